"""Eight Gaussians on a circle, the usual test for mode collapse (Metz et al. 2017, section 3.2.1).

Synthetic, from a seed of its own: every site and every run sees the same points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedwan.data.mixture import Mixture, draw_mixture
from fedwan.workloads.base import Batch

__all__ = ["NUM_MODES", "RADIUS", "SHAPE", "SIGMA", "load_ring8", "ring8_centres", "ring8_mixture"]

SHAPE = (2,)
NUM_MODES = 8
RADIUS = 2.0
SIGMA = 0.05
_TRAIN_PER_MODE = 1000
_HELD_OUT_PER_MODE = 50


def ring8_centres() -> Tensor:
    """The eight modes' centres, (8, 2) float32, counter-clockwise from (RADIUS, 0)."""
    angles = torch.arange(NUM_MODES, dtype=torch.float64) * (2 * math.pi / NUM_MODES)
    return (RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)).float()


def ring8_mixture() -> Mixture:
    """The distribution that the points are drawn from."""
    return Mixture(ring8_centres(), SIGMA)


def load_ring8() -> tuple[Batch, Batch]:
    """Training and held-out points, disjoint draws.

    Returns:
        Two batches: x (N, 2) float32, y (N,) int64 the mode; 8000 and 400 points.
    """
    mixture = ring8_mixture()
    return (
        draw_mixture(mixture, _TRAIN_PER_MODE, "ring8", "train"),
        draw_mixture(mixture, _HELD_OUT_PER_MODE, "ring8", "held out"),
    )
