"""Workload recipes, one page each, and the Flower ClientApp that runs them at a site."""
