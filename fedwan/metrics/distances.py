"""Distances between two samples of features: Frechet's and the kernel distance.

Frechet's sees each as a Gaussian (Heusel et al. 2017, equation 6), and is what the field calls FID:

    d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))

where the eigenvalues of C1 C2 are those of the symmetric C1^(1/2) C2 C1^(1/2). Moments are all that
it needs, and those of a union follow from those of its parts: each site hands in moments.

The kernel distance, KID (Binkowski et al. 2018, section 4), has k(x, y) = (x.y / d + 1)^3, d the
number of features, and is estimated without bias (Gretton et al. 2012, equation 3):

    mean over i != j of k(a_i, a_j)  +  the same of b  -  2 mean over i, j of k(a_i, b_j)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.errors import FedwanError


class Moments(NamedTuple):
    """What is known of a sample without any of its members, though the mean of one is that one."""

    num_samples: int
    """At least 1."""
    mean: Tensor
    """(features,), float64."""
    covariance: Tensor
    """(features, features), float64, unbiased; of one sample it has no part in anything."""


def moments(features: Tensor) -> Moments:
    """Moments of a sample, features (N, features) with N >= 1, in float64 on the CPU."""
    x = features.detach().to("cpu", torch.float64)
    mean = x.mean(dim=0)
    centred = x - mean
    return Moments(len(x), mean, centred.T @ centred / max(1, len(x) - 1))


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """Moments of a union of shards, as of all samples in one place but for rounding.

    Pairwise, as in Chan, Golub and LeVeque 1979 (equation 2.1): differences of means are squared,
    never means, so that an offset that all features share does no harm.
    """
    counts = [part.num_samples for part in parts]
    if sum(counts) < 2 or min(counts) < 1:
        raise ValueError(f"shards of {counts} samples cannot be merged; take two samples or more")
    num = len(parts[0].mean)
    shapes = [(tuple(part.mean.shape), tuple(part.covariance.shape)) for part in parts]
    if any(shape != ((num,), (num, num)) for shape in shapes):
        raise ValueError(f"moments of shapes {shapes} do not match; use one network at every site")
    merged = [_scatter(part) for part in parts]
    while len(merged) > 1:
        pairs = [merged[i : i + 2] for i in range(0, len(merged), 2)]
        merged = [_add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    total = merged[0]
    return total._replace(covariance=total.covariance / (total.num_samples - 1))


def frechet_distance(a: Moments, b: Moments) -> float:
    """Squared Frechet distance of two Gaussians, >= 0; a `FedwanError` if they are not finite."""
    if not all(torch.isfinite(part).all() for part in (*a[1:], *b[1:])):
        raise FedwanError("the Frechet distance is undefined: a sample holds values not finite")
    values, vectors = torch.linalg.eigh(a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    inner = root @ b.covariance @ root
    eigenvalues = torch.linalg.eigvalsh((inner + inner.T) / 2)
    cross = eigenvalues.clamp(min=0).sqrt().sum()
    squared = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
    return max(float(squared - 2 * cross), 0.0)


def frechet_between(a: Tensor, b: Tensor) -> float:
    """Of two samples of features; small ones bias it upwards: compare figures of equal sizes."""
    return frechet_distance(moments(a), moments(b))


def _scatter(part: Moments) -> Moments:
    """With the sum of the squared offsets from the mean, which adds up, for a covariance."""
    mean, covariance = (x.detach().to("cpu", torch.float64) for x in part[1:])
    # The covariance of one sample is 0 / 0 to many a library.
    covariance = covariance if part.num_samples > 1 else torch.zeros_like(covariance)
    return Moments(part.num_samples, mean, covariance * (part.num_samples - 1))


def _add(a: Moments, b: Moments) -> Moments:
    num = a.num_samples + b.num_samples
    between = b.mean - a.mean
    mean = a.mean + between * (b.num_samples / num)
    spread = between.outer(between) * (a.num_samples / num * b.num_samples)
    return Moments(num, mean, a.covariance + b.covariance + spread)


def kernel_between(a: Tensor, b: Tensor) -> float:
    """Squared kernel distance of two samples, (N, features) and (M, features), N and M >= 2."""
    a, b = (x.detach().to("cpu", torch.float64) for x in (a, b))
    return _mean_of_pairs(a) + _mean_of_pairs(b) - 2 * float(_kernel(a, b).mean())


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T).div_(x.shape[1]).add_(1).pow_(3)  # in place: a third of the time


def _mean_of_pairs(x: Tensor) -> float:
    """Of the kernel of two different members."""
    kernel = _kernel(x, x)
    return float(kernel.sum() - kernel.trace()) / (len(x) * (len(x) - 1))
