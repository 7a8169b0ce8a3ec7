"""Figures by nearest neighbours, within balls that reach a point's k-th nearest other.

Precision and recall: the share of generated samples in the balls of real ones, and of real samples
in those of generated ones (Kynkaanniemi et al. 2019, section 2).

Density: how many real balls a generated sample lies in, over the k to be expected. Coverage: the
share of real balls with a generated sample (Naeem et al. 2020, equations 2 and 3). Balls stand
around real samples only, so that one stray generated sample does not cover much.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["density_coverage", "precision_recall", "radii_of"]


def radii_of(points: Tensor, most: int) -> Tensor:
    """Distances of each point to its nearest others, nearest first: (N, features) -> (N, most)."""
    assert len(points) > most
    distances = torch.cdist(points, points)
    distances.fill_diagonal_(0)  # rounding must not make a point its own neighbour
    return distances.topk(most + 1, dim=1, largest=False).values[:, 1:]


def precision_recall(
    distances: Tensor, real_radii: Tensor, generated_radii: Tensor
) -> tuple[float, float]:
    """Both in [0, 1], from distances, generated to real (M, N), and each ball's radius."""
    precision = (distances <= real_radii).any(dim=1).double().mean()
    recall = (distances <= generated_radii[:, None]).any(dim=0).double().mean()
    return float(precision), float(recall)


def density_coverage(distances: Tensor, real_radii: Tensor, k: int) -> tuple[float, float]:
    """Density, about 1 for the real distribution, and coverage, in [0, 1], of balls of k."""
    inside = distances <= real_radii
    density = inside.sum() / (k * len(distances))
    return float(density), float(inside.any(dim=0).double().mean())
