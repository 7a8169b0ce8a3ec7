"""Strategies: the coordinator's recipes, one page each, and the Flower ServerApp."""
