"""The comparison with peers: one script per system, and the workloads that they share."""
