"""A model against held-out data of which every site has a part that nobody else may see.

Each site deals its part into two halves and hands in moments of features: of one half, of as many
generated samples, and of the other half. Merged over sites, `fd` is the distance between the first
halves and the generated samples, and `fd_floor` between the two halves, as of all data in one
place. Features are measured in deviations of the union's real ones, so that each counts alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.errors import PayloadError
from fedwan.metrics.distances import Moments, frechet_distance, merge_moments, moments
from fedwan.state import State

SMALLEST_DEVIATION = 1e-3
"""Added to the deviation of each feature, some of which hardly vary."""
_MOST = 64  # comparisons in a report
_MOST_FEATURES = 4096


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
        real, generated, other = (
            merge_moments([draw[index] for draw in draws]) for index in range(3)
        )
        union = merge_moments([part for draw in draws for part in (draw.real, draw.other)])
        scale = union.covariance.diagonal().clamp(min=0).sqrt() + SMALLEST_DEVIATION
        fds.append(frechet_distance(_scaled(real, scale), _scaled(generated, scale)))
        floors.append(frechet_distance(_scaled(real, scale), _scaled(other, scale)))
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
    num, features = len(counts), means.shape[-1] if means.dim() else 0
    if not (0 < num <= _MOST and 0 < features <= _MOST_FEATURES):
        raise PayloadError(f"a report holds {num} moments of {features} features; refused")
    shapes = [tuple(tensor.shape) for tensor in (counts, means, covariances)]
    if shapes != [(num, 3), (num, 3, features), (num, 3, features, features)]:
        raise PayloadError(f"a report's moments are of shapes {shapes}; refused")
    if not all(torch.isfinite(tensor).all() for tensor in (means, covariances)):
        raise PayloadError("a report's moments are not finite")
    if counts.is_floating_point() or int(counts.min()) < 1:
        raise PayloadError("a report's moments count no samples; refused")
    rows = zip(counts.tolist(), means, covariances, strict=True)
    return [Comparison(*map(Moments, *row)) for row in rows]


def _scaled(part: Moments, scale: Tensor) -> Moments:
    return Moments(part.num_samples, part.mean / scale, part.covariance / scale.outer(scale))
