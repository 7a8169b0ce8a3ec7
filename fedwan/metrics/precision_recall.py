"""Precision and recall of a generator by nearest neighbours (Kynkaanniemi et al. 2019, section 2).

A sample lies in the manifold of a set if it is within the k-nearest-neighbour radius of one of its
members. Precision: the share of generated samples in the real manifold. Recall: the share of real
samples in the generated one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.metrics.neighbours import find_neighbours

__all__ = ["PrecisionRecall", "precision_recall", "precision_recall_within"]


class PrecisionRecall(NamedTuple):
    """Both in [0, 1], higher is better."""

    precision: float
    recall: float


def precision_recall(real: Tensor, generated: Tensor, k: int = 3) -> PrecisionRecall:
    """Precision and recall of generated features against real ones.

    Args:
        real: (N, features), N > k.
        generated: (M, features), M > k.
        k: neighbours that span the manifold; the paper takes 3.
    """
    ours, theirs = find_neighbours(generated, k), find_neighbours(real, k)
    distances = torch.cdist(ours.points, theirs.points)
    return precision_recall_within(distances, theirs.radii(k), ours.radii(k))


def precision_recall_within(
    distances: Tensor, real_radii: Tensor, generated_radii: Tensor
) -> PrecisionRecall:
    """The same from distances: generated to real (M, N), and each ball's radius, (N,) and (M,)."""
    precision = (distances <= real_radii).any(dim=1).double().mean()
    recall = (distances <= generated_radii[:, None]).any(dim=0).double().mean()
    return PrecisionRecall(float(precision), float(recall))
