"""Mixtures of equal, round Gaussians in the plane, on which dropped modes can be counted.

Synthetic, from seeds of their own: every site and every run sees the same points.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["Mixture", "draw_mixture", "grid25", "ring8"]


class Mixture(NamedTuple):
    """Where the modes are."""

    centres: Tensor
    """(modes, dimensions), float32."""
    sigma: float
    """Standard deviation of each mode, the same in every dimension."""


def ring8() -> Mixture:
    """Eight modes on a circle of radius 2, the usual test for mode collapse (Metz et al. 2017)."""
    angles = torch.arange(8, dtype=torch.float64) * (2 * math.pi / 8)
    return Mixture((2.0 * torch.stack([angles.cos(), angles.sin()], dim=1)).float(), 0.05)


def grid25() -> Mixture:
    """Twenty-five modes at whole numbers from -2 to 2, row by row (Azadi et al. 2019, section 4.1).

    Harder than the ring: a mode has up to eight neighbours, and is small beside the gaps.
    """
    axis = torch.arange(5, dtype=torch.float32) - 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return Mixture(torch.stack([x.flatten(), y.flatten()], dim=1), 0.05)


def draw_mixture(
    mixture: Mixture, name: str, train_per_mode: int, held_out_per_mode: int
) -> tuple[Batch, Batch]:
    """Training and held-out points, as many of every mode, the same ones in every process.

    Returns:
        Two batches: x (N, dimensions) float32, y (N,) int64 the mode; `name` seeds the draws.
    """
    parts = (("train", train_per_mode), ("held out", held_out_per_mode))
    train, held_out = (_draw(mixture, num, name, part) for part, num in parts)
    return train, held_out


def _draw(mixture: Mixture, num_per_mode: int, name: str, part: str) -> Batch:
    generator = torch.Generator().manual_seed(derive_seed(name, part))
    num_modes, dimensions = mixture.centres.shape
    y = torch.arange(num_modes).repeat(num_per_mode)
    noise = torch.randn(len(y), dimensions, generator=generator)
    return Batch(mixture.centres[y] + mixture.sigma * noise, y)
