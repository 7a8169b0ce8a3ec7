"""A mixture of equal, round Gaussians: the synthetic data on which dropped modes can be counted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["Mixture", "draw_mixture"]


class Mixture(NamedTuple):
    """Where the modes are."""

    centres: Tensor
    """(modes, dimensions), float32."""
    sigma: float
    """Standard deviation of each mode, the same in every dimension."""


def draw_mixture(mixture: Mixture, num_per_mode: int, name: str, part: str) -> Batch:
    """The same number of points of every mode, the same ones in every process.

    Args:
        mixture: what to draw from.
        num_per_mode: points of each mode.
        name: of the data set; it seeds the draw, together with `part`.
        part: `train` or `held out`.

    Returns:
        x (modes * num_per_mode, dimensions) float32, and y the mode, int64.
    """
    generator = torch.Generator().manual_seed(derive_seed(name, part))
    num_modes, dimensions = mixture.centres.shape
    y = torch.arange(num_modes).repeat(num_per_mode)
    noise = torch.randn(len(y), dimensions, generator=generator)
    return Batch(mixture.centres[y] + mixture.sigma * noise, y)
