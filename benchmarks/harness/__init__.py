"""What the benchmarks share: tables, processes, fleets and simulated runs."""
