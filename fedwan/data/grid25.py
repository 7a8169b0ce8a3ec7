"""Twenty-five Gaussians on a 5 x 5 grid (Azadi et al. 2019, section 4.1; Srivastava et al. 2017).

Harder than the ring: a mode has up to eight neighbours, and the modes are small beside the gaps.
Synthetic, from a seed of its own: every site and every run sees the same points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.data.mixture import Mixture, draw_mixture
from fedwan.workloads.base import Batch

__all__ = ["NUM_MODES", "SHAPE", "SIDE", "SIGMA", "grid25_centres", "grid25_mixture", "load_grid25"]

SHAPE = (2,)
SIDE = 5
NUM_MODES = SIDE * SIDE
SIGMA = 0.05
_TRAIN_PER_MODE = 400
_HELD_OUT_PER_MODE = 20


def grid25_centres() -> Tensor:
    """The modes' centres, (25, 2) float32: whole numbers from -2 to 2, row by row from below."""
    axis = torch.arange(SIDE, dtype=torch.float32) - SIDE // 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)


def grid25_mixture() -> Mixture:
    """The distribution that the points are drawn from."""
    return Mixture(grid25_centres(), SIGMA)


def load_grid25() -> tuple[Batch, Batch]:
    """Training and held-out points, disjoint draws.

    Returns:
        Two batches: x (N, 2) float32, y (N,) int64 the mode; 10,000 and 500 points.
    """
    mixture = grid25_mixture()
    return (
        draw_mixture(mixture, _TRAIN_PER_MODE, "grid25", "train"),
        draw_mixture(mixture, _HELD_OUT_PER_MODE, "grid25", "held out"),
    )
