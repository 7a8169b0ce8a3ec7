"""What the benchmarks share: tables, pictures, processes, fleets and simulated runs."""
