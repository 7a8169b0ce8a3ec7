"""Outer optimisers, composed with `chain`, and the steps that the coordinator takes with them."""

from fedwan.outer.transforms import Transform, chain, delayed_nesterov, nesterov, sgd

__all__ = ["Transform", "chain", "delayed_nesterov", "nesterov", "sgd"]
