"""Frechet distance between two samples, each seen as a Gaussian (Heusel et al. 2017, equation 6).

    d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))

The trace of the root needs no matrix root: the eigenvalues of C1 C2 are those of the symmetric
C1^(1/2) C2 C1^(1/2), never negative but for rounding, so their roots are taken and summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.errors import FedwanError

__all__ = ["Moments", "frechet_between", "frechet_distance", "moments"]


class Moments(NamedTuple):
    """Mean and covariance of a sample, float64."""

    mean: Tensor
    """(features,)"""
    covariance: Tensor
    """(features, features), unbiased"""


def moments(features: Tensor) -> Moments:
    """Moments of a sample, features (N, features) with N >= 2, in float64 on the CPU."""
    x = features.detach().to("cpu", torch.float64)
    mean = x.mean(dim=0)
    centred = x - mean
    return Moments(mean, centred.T @ centred / (len(x) - 1))


def frechet_distance(a: Moments, b: Moments) -> float:
    """Squared Frechet distance of two Gaussians, >= 0; what the field calls FID.

    Raises:
        FedwanError: a moment is not finite, as after a divergence.
    """
    if not all(torch.isfinite(part).all() for part in (*a, *b)):
        raise FedwanError("the Frechet distance is undefined: a sample holds values not finite")
    root = _symmetric_root(a.covariance)
    inner = root @ b.covariance @ root
    eigenvalues = torch.linalg.eigvalsh((inner + inner.T) / 2)
    cross = eigenvalues.clamp(min=0).sqrt().sum()
    squared = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
    return max(float(squared - 2 * cross), 0.0)


def frechet_between(a: Tensor, b: Tensor) -> float:
    """Squared Frechet distance of two samples of features, (N, features) and (M, features).

    The covariance of a small sample biases it upwards: compare only figures of equal N and M.
    """
    return frechet_distance(moments(a), moments(b))


def _symmetric_root(matrix: Tensor) -> Tensor:
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * eigenvalues.clamp(min=0).sqrt()) @ vectors.T
    return root
