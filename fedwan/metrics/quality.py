"""Quality of generated samples against held-out real data, with the floor that real data reach.

The Frechet distance of small samples is biased upwards, so a figure means something only beside its
floor, and only if both were taken the same way. Here, with n held-out samples:

    fd        distance between the n held-out samples and n generated ones
    fd_floor  distance between the n held-out samples and n of the real training split

each the mean over `NUM_DRAWS` disjoint draws of n. A perfect generator has fd = fd_floor.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.data.ring8 import SIGMA, ring8_centres
from fedwan.errors import FedwanError
from fedwan.metrics.classifier import Classifier, load_classifier
from fedwan.metrics.frechet import frechet_between
from fedwan.metrics.modes import count_modes
from fedwan.metrics.precision_recall import precision_recall
from fedwan.metrics.threads import one_thread
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["NUM_DRAWS", "measure_quality"]

NUM_DRAWS = 3
"""Draws that `fd` and `fd_floor` average over; their spread alone would be about a fifth."""


class _Seen(NamedTuple):
    """Samples as the metrics see them."""

    features: Tensor
    """(N, features)"""
    figures: dict[str, Any]
    """What is specific to the data: `histogram`, and `modes` and `good` of a mixture."""


def measure_quality(data_name: str, real: Batch, generated: Tensor) -> dict[str, Any]:
    """Figures of merit of generated samples.

    Args:
        data_name: as in `data.name`.
        real: held-out data, x (n, …).
        generated: samples, (NUM_DRAWS * n, …), of the same shape and scale.

    Returns:
        JSON-ready: `fd` and `fd_floor` (lower is better), `precision` and `recall` (higher is
        better), `histogram` (share of samples per class or mode); for ring8 also `modes` (of 8)
        and `good` (share of samples near a mode).

    Raises:
        FedwanError: samples that are not finite.
    """
    num = len(real.x)
    assert generated.shape == (NUM_DRAWS * num, *real.x.shape[1:])
    if not torch.isfinite(generated).all():
        raise FedwanError(
            "generated samples are not finite: training diverged; "
            "lower the learning rates (inner.NETWORK.lr, outer.NETWORK.lr)"
        )
    with one_thread():
        held_out = _see(data_name, real.x).features
        fake, figures = _see(data_name, generated)
        reference = _see(data_name, _draw_training(data_name, num)).features
        spread = precision_recall(held_out, fake[:num])
        return {
            "fd": _mean_distance(held_out, fake),
            "fd_floor": _mean_distance(held_out, reference),
            "precision": spread.precision,
            "recall": spread.recall,
            **figures,
        }


def _mean_distance(held_out: Tensor, features: Tensor) -> float:
    """Mean Frechet distance of `features`, (draws * n, …), n at a time, to `held_out`, (n, …)."""
    draws = features.chunk(len(features) // len(held_out))
    return fmean(frechet_between(held_out, draw) for draw in draws)


def _draw_training(data_name: str, num: int) -> Tensor:
    """Samples of the public training split, (draws * num, …), the same ones every time."""
    train, _ = find_source(data_name).load()
    draws = min(NUM_DRAWS, len(train.x) // num)
    assert draws > 0
    generator = torch.Generator().manual_seed(derive_seed(data_name, "floor"))
    return train.x[torch.randperm(len(train.x), generator=generator)[: draws * num]]


def _see(data_name: str, x: Tensor) -> _Seen:
    """Points are their own features; images are seen through a classifier."""
    source = find_source(data_name)
    if source.name == "ring8":
        points = x.detach().cpu()
        return _Seen(points, count_modes(points, ring8_centres(), SIGMA)._asdict())
    features, labels = _classifier(data_name).features_and_labels(x)
    counts = torch.bincount(labels, minlength=source.num_classes).double()
    return _Seen(features, {"histogram": (counts / len(labels)).tolist()})


@cache
def _classifier(data_name: str) -> Classifier:
    return load_classifier(data_name)
