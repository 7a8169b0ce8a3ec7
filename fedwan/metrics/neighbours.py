"""Distances from each point of a sample to its nearest others, shared by the figures that use them.

Precision and recall (Kynkaanniemi et al. 2019) and density and coverage (Naeem et al. 2020) draw a
ball around each point, as far as its k-th nearest neighbour in its own sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Neighbours", "find_neighbours"]


class Neighbours(NamedTuple):
    """A sample and how close its points lie, float64 on the CPU."""

    points: Tensor
    """(N, features)"""
    distances: Tensor
    """To the nearest other points, nearest first, (N, neighbours)."""

    def radii(self, k: int) -> Tensor:
        """Distance of each point to its k-th nearest other, (N,)."""
        return self.distances[:, k - 1]


def find_neighbours(features: Tensor, k: int) -> Neighbours:
    """The k nearest others of each point of a sample, features (N, features) with N > k."""
    assert len(features) > k
    points = features.detach().to("cpu", torch.float64)
    distances = torch.cdist(points, points)
    distances.fill_diagonal_(0)  # rounding must not make a point its own neighbour
    nearest = distances.topk(k + 1, dim=1, largest=False).values
    return Neighbours(points, nearest[:, 1:])
