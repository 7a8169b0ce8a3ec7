"""Precision and recall of a generator by nearest neighbours (Kynkaanniemi et al. 2019, section 2).

A sample lies in the manifold of a set if it is within the k-nearest-neighbour radius of one of its
members. Precision: the share of generated samples in the real manifold. Recall: the share of real
samples in the generated one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PrecisionRecall", "precision_recall"]


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
    assert min(len(real), len(generated)) > k
    real, generated = (x.detach().to("cpu", torch.float64) for x in (real, generated))
    distances = torch.cdist(generated, real)  # (M, N)
    precision = (distances <= _radii(real, k)).any(dim=1).double().mean()
    recall = (distances <= _radii(generated, k)[:, None]).any(dim=0).double().mean()
    return PrecisionRecall(float(precision), float(recall))


def _radii(points: Tensor, k: int) -> Tensor:
    distances = torch.cdist(points, points)
    distances.fill_diagonal_(0)  # rounding must not make a point its own neighbour
    return distances.kthvalue(k + 1, dim=1).values
