"""Modes of a mixture that a generator found, and good samples (Srivastava et al. 2017).

A sample is good if it lies within three standard deviations of the nearest centre. A mode is found
if it has at least a tenth of the good samples that an even share would give it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ModeCount", "count_modes"]


class ModeCount(NamedTuple):
    """What `count_modes` finds."""

    modes: int
    """Modes found."""
    good: float
    """Share of good samples, in [0, 1]; 0.989 for draws from the true mixture in the plane."""
    histogram: list[float]
    """Share of all samples that are nearest to each centre; sums to 1."""


def count_modes(points: Tensor, centres: Tensor, sigma: float) -> ModeCount:
    """Count the modes that samples found.

    Args:
        points: samples, (N, dimensions).
        centres: of the mixture's modes, (modes, dimensions).
        sigma: standard deviation of each mode, the same in every dimension.
    """
    distances = torch.cdist(points.detach().cpu().double(), centres.cpu().double())
    nearest_distance, nearest = distances.min(dim=1)
    good = nearest_distance <= 3 * sigma
    num = len(centres)
    good_by_mode = torch.bincount(nearest[good], minlength=num)
    share = torch.bincount(nearest, minlength=num).double() / len(points)
    return ModeCount(
        modes=int((good_by_mode >= len(points) / num / 10).sum()),
        good=float(good.double().mean()),
        histogram=share.tolist(),
    )
