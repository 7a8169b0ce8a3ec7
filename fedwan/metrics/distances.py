"""The Frechet distance between two samples of features.

It sees each as a Gaussian (Heusel et al. 2017, equation 6), and is what the field calls FID:

    d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))

where the eigenvalues of C1 C2 are those of the symmetric C1^(1/2) C2 C1^(1/2). Moments are all that
it needs, and those of a union follow from those of its parts: each site hands in moments.

A model is compared with held-out data of which every site has a part that nobody else may see: each
site deals its part into two halves and hands in moments of features: of one half, of as many
generated samples, and of the other half. Merged over sites, `fd` is the distance between the first
halves and the generated samples, and `fd_floor` between the two halves, as of all data in one
place. Features are measured in deviations of the union's real ones, so that each counts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.errors import FedwanError, PayloadError
from fedwan.state import State


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

    Differences of means are squared, never means, so that an offset that all features share does
    no harm.
    """
    counts = [part.num_samples for part in parts]
    if sum(counts) < 2 or min(counts) < 1:
        raise ValueError(f"shards of {counts} samples cannot be merged; take two samples or more")
    num = len(parts[0].mean)
    shapes = [(tuple(part.mean.shape), tuple(part.covariance.shape)) for part in parts]
    if any(shape != ((num,), (num, num)) for shape in shapes):
        raise ValueError(f"moments of shapes {shapes} do not match; use one network at every site")
    total, shares = sum(counts), torch.tensor(counts, dtype=torch.float64)
    means = torch.stack([part.mean.detach().to("cpu", torch.float64) for part in parts])
    mean = shares @ means / total
    apart = means - mean
    scatter = (apart.T * shares) @ apart
    for part in parts:
        if part.num_samples > 1:  # else its covariance is 0 / 0 to many a library
            scatter += part.covariance.detach().to(scatter) * (part.num_samples - 1)
    return Moments(total, mean, scatter / (total - 1))


def distance_from(a: Moments) -> Callable[[Moments], float]:
    """Squared Frechet distances, >= 0, from one Gaussian to others; its root is taken once.

    A `FedwanError` if they are not finite.
    """
    _require_finite(a)
    values, vectors = torch.linalg.eigh(a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T

    def distance(b: Moments) -> float:
        _require_finite(b)
        inner = root @ b.covariance @ root
        eigenvalues = torch.linalg.eigvalsh((inner + inner.T) / 2)
        cross = eigenvalues.clamp(min=0).sqrt().sum()
        squared = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
        return max(float(squared - 2 * cross), 0.0)

    return distance


def _require_finite(part: Moments) -> None:
    if not all(torch.isfinite(tensor).all() for tensor in part[1:]):
        raise FedwanError("the Frechet distance is undefined: a sample holds values not finite")


def frechet_between(a: Tensor, b: Tensor) -> float:
    """Of two samples of features; small ones bias it upwards: compare figures of equal sizes."""
    return distance_from(moments(a))(moments(b))


SMALLEST_DEVIATION = 1e-3
"""Added to the deviation of each feature, some of which hardly vary."""
_MOST = 64  # comparisons in a report
_MOST_FEATURES = 4096
_MOST_COUNT = 1 << 40


class Comparison(NamedTuple):
    """One draw of generated samples, beside real ones and others that are not among these."""

    real: Moments
    generated: Moments
    other: Moments


def compare(real: Tensor, generated: Tensor, other: Tensor) -> Comparison:
    """What a site hands in of three sets of features, each (N, features) with N >= 1."""
    return Comparison(*(moments(x) for x in (real, generated, other)))


def merge_comparisons(parts: Sequence[Sequence[Comparison]]) -> dict[str, float]:
    """Means of `fd` and `fd_floor` of all sites' data together, over the comparisons.

    A `ValueError` if parts do not match or are too few, a `FedwanError` if they are not finite.
    """
    if len({len(part) for part in parts}) != 1:
        raise ValueError("sites compare different numbers of draws")
    fds, floors = [], []
    for draws in zip(*parts, strict=True):
        real, generated, other = map(merge_moments, zip(*draws, strict=True))
        union = merge_moments([part for draw in draws for part in (draw.real, draw.other)])
        scale = union.covariance.diagonal().clamp(min=0).sqrt() + SMALLEST_DEVIATION
        distance = distance_from(_scaled(real, scale))
        fds.append(distance(_scaled(generated, scale)))
        floors.append(distance(_scaled(other, scale)))
    return {"fd": fmean(fds), "fd_floor": fmean(floors)}


def pack_comparisons(comparisons: Sequence[Comparison]) -> State:
    """As tensors: `counts` (n, 3) int64, `means` (n, 3, features), `covariances`, float64."""
    counts = [[part.num_samples for part in comparison] for comparison in comparisons]
    return {
        "counts": torch.tensor(counts),
        "means": torch.stack([torch.stack([p.mean for p in c]) for c in comparisons]),
        "covariances": torch.stack([torch.stack([p.covariance for p in c]) for c in comparisons]),
    }


def unpack_comparisons(tensors: State) -> list[Comparison]:
    """The inverse, of tensors that came over a link; a `PayloadError` for what no site packs."""
    try:
        counts, means, covariances = (tensors[n] for n in ("counts", "means", "covariances"))
    except KeyError as error:
        raise PayloadError(f"a report's moments lack {error}") from None
    num, features = (len(counts), means.shape[-1]) if counts.dim() and means.dim() else (0, 0)
    if not (0 < num <= _MOST and 0 < features <= _MOST_FEATURES):
        raise PayloadError(f"a report holds {num} moments of {features} features; refused")
    shapes = [tuple(tensor.shape) for tensor in (counts, means, covariances)]
    if shapes != [(num, 3), (num, 3, features), (num, 3, features, features)]:
        raise PayloadError(f"a report's moments are of shapes {shapes}; refused")
    if not all(torch.isfinite(tensor).all() for tensor in (means, covariances)):
        raise PayloadError("a report's moments are not finite")
    if counts.is_floating_point() or not 0 < int(counts.min()) <= int(counts.max()) <= _MOST_COUNT:
        raise PayloadError(f"a report's moments count no samples, or above {_MOST_COUNT}; refused")
    rows = zip(counts.tolist(), means, covariances, strict=True)
    return [Comparison(*map(Moments, *row)) for row in rows]


def _scaled(part: Moments, scale: Tensor) -> Moments:
    return Moments(part.num_samples, part.mean / scale, part.covariance / scale.outer(scale))
