"""Real handwritten digits: scikit-learn's bundled 1797 images of 8x8 pixels (UCI, Alpaydin 1998).

Forty images of each digit are held out, the same ones whatever the run's seed, so that figures of
different runs compare.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.extras import require
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["HELD_OUT_PER_CLASS", "NUM_CLASSES", "SHAPE", "load_digits"]

SHAPE = (1, 8, 8)
NUM_CLASSES = 10
HELD_OUT_PER_CLASS = 40
_MAX_INK = 16.0  # a pixel counts the dark dots of a 4x4 block of the scan


def load_digits() -> tuple[Batch, Batch]:
    """Training and held-out images, disjoint.

    Returns:
        Two batches: x (N, 1, 8, 8) float32 in [-1, 1], y (N,) int64; 1397 and 400 images.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    bundled = require("sklearn.datasets", "demo").load_digits()
    x = torch.tensor(bundled.images, dtype=torch.float32).unsqueeze(1) * (2 / _MAX_INK) - 1
    y = torch.tensor(bundled.target, dtype=torch.int64)
    held_out = _stratified_mask(y)
    return Batch(x[~held_out], y[~held_out]), Batch(x[held_out], y[held_out])


def _stratified_mask(y: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("digits", "held out"))
    mask = torch.zeros(len(y), dtype=torch.bool)
    for label in range(NUM_CLASSES):
        members = (y == label).nonzero().squeeze(1)
        chosen = torch.randperm(len(members), generator=generator)[:HELD_OUT_PER_CLASS]
        mask[members[chosen]] = True
    return mask
