"""Workload recipes of the benchmark; `app.py` lays them beside fedwan's own."""
