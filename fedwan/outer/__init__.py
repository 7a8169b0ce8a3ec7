"""Outer optimisers, composed with `chain`."""

from fedwan.outer.transforms import Transform, chain, delayed_nesterov, nesterov, sgd

__all__ = ["Transform", "chain", "delayed_nesterov", "nesterov", "sgd"]
