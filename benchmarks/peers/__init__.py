"""What `benchmarks/peers.py` runs: one script per system, and the workloads that they share."""
