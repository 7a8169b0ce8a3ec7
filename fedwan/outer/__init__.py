"""Outer optimisers: one idea per file, composed with `chain`."""

from fedwan.outer.base import Transform, chain
from fedwan.outer.transforms import clip_by_norm, delayed_nesterov, nesterov, sgd

__all__ = ["Transform", "chain", "clip_by_norm", "delayed_nesterov", "nesterov", "sgd"]
