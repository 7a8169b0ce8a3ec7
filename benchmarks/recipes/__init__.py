"""Workloads of the benchmarks; `harness/fleet.py` lays them beside fedwan's own."""
