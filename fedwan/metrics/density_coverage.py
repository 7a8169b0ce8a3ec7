"""Density and coverage of a generator by nearest neighbours (Naeem et al. 2020, section 3).

Around each real sample lies a ball that reaches its k-th nearest real neighbour. Density: how many
of these balls a generated sample lies in, as a share of the k that are to be expected (equation 2).
Coverage: the share of balls that some generated sample lies in (equation 3). Balls stand around
real samples only, so that one stray generated sample does not cover much, as it does in recall.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.metrics.neighbours import find_neighbours

__all__ = ["DensityCoverage", "density_coverage", "density_coverage_within"]


class DensityCoverage(NamedTuple):
    """Higher is better."""

    density: float
    """At least 0, and about 1 for the real distribution; it may pass that."""
    coverage: float
    """In [0, 1]."""


def density_coverage(real: Tensor, generated: Tensor, k: int = 5) -> DensityCoverage:
    """Density and coverage of generated features against real ones.

    Coverage grows with the number of generated samples: compare only figures of equal N and M.

    Args:
        real: (N, features), N > k.
        generated: (M, features).
        k: neighbours that a ball holds; the paper takes 5.
    """
    theirs = find_neighbours(real, k)
    points = generated.detach().to("cpu", torch.float64)
    return density_coverage_within(torch.cdist(points, theirs.points), theirs.radii(k), k)


def density_coverage_within(distances: Tensor, real_radii: Tensor, k: int) -> DensityCoverage:
    """The same from distances: generated to real (M, N), and the radii of the real balls, (N,)."""
    inside = distances <= real_radii
    density = inside.sum() / (k * len(distances))
    return DensityCoverage(float(density), float(inside.any(dim=0).double().mean()))
