"""Networks of the bundled workloads, small enough to train on a CPU core."""
