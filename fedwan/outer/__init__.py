"""Outer optimisers: one idea per file, composed with `chain`."""

from fedwan.outer.base import Transform, chain
from fedwan.outer.clip import clip_by_norm
from fedwan.outer.delayed_nesterov import delayed_nesterov
from fedwan.outer.nesterov import nesterov
from fedwan.outer.sgd import sgd

__all__ = ["Transform", "chain", "clip_by_norm", "delayed_nesterov", "nesterov", "sgd"]
