"""Outer optimisers."""

from fedwan.outer.transforms import Transform, delayed_nesterov, nesterov, sgd

__all__ = ["Transform", "delayed_nesterov", "nesterov", "sgd"]
