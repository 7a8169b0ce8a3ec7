"""Quality of generated samples against held-out real data, with the floor that real data reach.

The Frechet distance of small samples is biased upwards, so a figure means something only beside its
floor, taken the same way: `fd` is the distance between the n held-out samples and n generated ones,
`fd_floor` between them and n of the real training split, each the mean over `NUM_DRAWS` disjoint
draws. A perfect generator has fd = fd_floor. Of files, and of a recipe's own pictures, there is no
public training split: their held-out samples are dealt into two halves, seen through random
features in deviations of their own, or through the network that `eval.features` names, as it gives
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.data.sources import SOURCES
from fedwan.errors import FedwanError
from fedwan.metrics.distances import (
    SMALLEST_DEVIATION,
    Comparison,
    Moments,
    compare,
    distance_from,
    frechet_between,
    moments,
    pack_comparisons,
)
from fedwan.metrics.features import load_classifier, one_thread, see_images
from fedwan.metrics.network import Network, load_network
from fedwan.rng import derive_seed
from fedwan.state import hash_state
from fedwan.workloads.base import Batch

NUM_DRAWS = 3
"""Draws that `fd` averages over; the spread of one alone would be about a fifth."""
_NUM_DEALS = 3
_MOST_KNOWN = 8  # held-out sets that are remembered
_FEW = 6  # samples below which a mean says much of each


@one_thread()
def count_modes(points: Tensor, centres: Tensor, sigma: float) -> dict[str, Any]:
    """Of points (N, dimensions), beside a mixture's centres (modes, dimensions) of deviation sigma.

    `good` is the share of points within three deviations of the nearest centre; of `modes` found
    each has at least a tenth of the good points of an even share (Srivastava et al. 2017);
    `histogram` is the share of points nearest to each centre.
    """
    distances = torch.cdist(points.detach().cpu().double(), centres.cpu().double())
    nearest_distance, nearest = distances.min(dim=1)
    good = nearest_distance <= 3 * sigma
    num = len(centres)
    good_by_mode = torch.bincount(nearest[good], minlength=num)
    share = torch.bincount(nearest, minlength=num).double() / len(points)
    return {
        "modes": int((good_by_mode >= len(points) / num / 10).sum()),
        "good": float(good.double().mean()),
        "histogram": share.tolist(),
    }


def num_generated(data_name: str, num: int) -> int:
    """How many samples `measure_quality` takes beside so many held-out ones."""
    return NUM_DRAWS * (max(1, num // 2) if data_name not in SOURCES else num)


def measure_quality(
    data_name: str, real: Batch, generated: Tensor, features: str = ""
) -> dict[str, Any]:
    """Figures of `num_generated` samples beside n held-out ones, n > 0.

    Of one picture of files, or of one's own data set (`data_name` ''), there are none, nor of what
    is no picture. They are seen through the network that `features` names, if any
    (`fedwan.metrics.network`).

    JSON-ready: `num_real`, real samples that a draw is compared with; `fd` and `fd_floor`; and what
    the data allow of `histogram`, `modes` and `good`. Where half of the files are six or more, seen
    through random features, also `moments`, tensors (`fedwan.metrics.distances`). A `FedwanError`
    if samples are not finite.
    """
    num = len(real.x)
    is_own = data_name not in SOURCES
    if is_own and (num < 2 or real.x.dim() != 4 or real.x.shape[1] not in (1, 3)):
        return {}
    assert generated.shape == (num_generated(data_name, num), *real.x.shape[1:])
    _refuse_diverged(generated)
    network = load_network(features, generated.device) if features else None
    if is_own:
        known, figures = _know_halves(_Samples.of(real.x), network), dict[str, Any]()
        fake = (network or see_images)(generated)
    else:
        known = _know_public(data_name, _Samples.of(real.x), network)
        fake, figures = _see(data_name, generated, network)
    with one_thread():  # not around the user's own network
        draws = fake.chunk(NUM_DRAWS)
        if known.halves is not None:
            one, other = known.halves
            parts = [Comparison(one, moments(draw), other) for draw in draws]
            figures["moments"] = pack_comparisons(parts)
        fd = fmean(known.distance(moments(draw / known.scale)) for draw in draws)
    return {"fd": fd, "fd_floor": known.floor, "num_real": known.num_real} | figures


def measure_translation(
    targets: Tensor, generated: Tensor, features: str = "", *, with_moments: bool = False
) -> dict[str, Any]:
    """Figures of merit of images that are made from given inputs.

    The n held-out pairs are dealt into two halves, several times over, so that a generator that hit
    every target would have fd = fd_floor: `fd` between the targets of one half and the images for
    the other's inputs, `fd_floor` between the targets of both, and `l1`, mean |image - target|.
    They are seen through the network at the path `features`, if given, else random features.

    Images are (n, 3, height, width) in the same order; of one there is `l1` alone. `with_moments`
    adds `moments`, by which several sites' images are compared, where a half has 6 images or more.
    A `FedwanError` if they are not finite.
    """
    assert targets.shape == generated.shape
    _refuse_diverged(generated)
    l1 = float((generated.cpu() - targets.cpu()).abs().mean())
    if (half := len(targets) // 2) < 1:
        return {"l1": l1}
    network = load_network(features, generated.device) if features else see_images
    fake = network(generated)
    real, scale, floor = _know_targets(_Samples.of(targets), network)
    with one_thread():
        ways = [way for one, other in _deals(len(real)) for way in ((one, other), (other, one))]
        packed: dict[str, Any] = {}
        if with_moments and not features and half >= _FEW:
            parts = [compare(real[one], fake[other], real[other]) for one, other in ways]
            packed["moments"] = pack_comparisons(parts)
        real, fake = real / scale, fake / scale
        fd = fmean(frechet_between(real[one], fake[other]) for one, other in ways)
    return packed | {"num_real": half, "fd": fd, "fd_floor": floor, "l1": l1}


def _see(data_name: str, x: Tensor, network: Network | None) -> tuple[Tensor, dict[str, Any]]:
    """Features of samples (N, …), (N, features), and figures of these data alone.

    Points are their own features; images are seen through a network, or their data's classifier.
    """
    source = find_source(data_name, x.shape[-1])
    if source.mixture is not None:
        points = x.detach().cpu()
        return points, count_modes(points, *source.mixture())
    if network is not None:
        return network(x), {}
    features, logits = load_classifier(source.name, x.shape[-1])(x)
    counts = torch.bincount(logits.argmax(dim=1), minlength=source.num_classes).double()
    return features, {"histogram": (counts / len(x)).tolist()}


def _refuse_diverged(generated: Tensor) -> None:
    if not torch.isfinite(generated).all():
        raise FedwanError(
            "generated samples are not finite: training diverged; "
            "lower the learning rates (inner.NETWORK.lr, outer.NETWORK.lr)"
        )


@dataclass(frozen=True)
class _Samples:
    """Samples as keys of a cache: the same ones are equal."""

    sha256: str
    x: Tensor = field(compare=False)
    """(N, …)"""

    @classmethod
    def of(cls, x: Tensor) -> _Samples:
        return cls(hash_state({"x": x}), x)


class _Known(NamedTuple):
    """Of held-out samples, what all evaluations of a run have in common."""

    num_real: int
    distance: Callable[[Moments], float]
    """From their features, divided by `scale`."""
    floor: float
    scale: Tensor
    halves: tuple[Moments, Moments] | None = None
    """Of features as they are, for other sites' to be merged with."""


@lru_cache(maxsize=_MOST_KNOWN)
def _know_public(data_name: str, real: _Samples, network: Network | None) -> _Known:
    """Held-out samples of data with a public training split."""
    held_out, _ = _see(data_name, real.x, network)
    num = len(held_out)
    train, _ = find_source(data_name, real.x.shape[-1]).load()
    draws = min(NUM_DRAWS, len(train.x) // num)
    assert draws > 0
    generator = torch.Generator().manual_seed(derive_seed(data_name, "floor"))
    drawn = torch.randperm(len(train.x), generator=generator)[: draws * num]
    training, _ = _see(data_name, train.x[drawn], network)
    with one_thread():
        distance = distance_from(moments(held_out))
        floor = fmean(distance(moments(draw)) for draw in torch.split(training, num))
    return _Known(num, distance, floor, torch.ones(()))


@lru_cache(maxsize=_MOST_KNOWN)
def _know_halves(real: _Samples, network: Network | None) -> _Known:
    """Half of the held-out samples, beside the other half."""
    first, second = _halves(len(real.x), "halves", len(real.x))
    see = network or see_images
    one, other = see(real.x[first]), see(real.x[second])
    with one_thread():
        scale, halves = torch.ones(()), None
        if network is None:
            scale = torch.cat([one, other]).std(dim=0) + SMALLEST_DEVIATION
            if len(one) >= _FEW:
                halves = moments(one), moments(other)
        distance = distance_from(moments(one / scale))
        return _Known(len(one), distance, distance(moments(other / scale)), scale, halves)


@lru_cache(maxsize=_MOST_KNOWN)
def _know_targets(targets: _Samples, network: Network) -> tuple[Tensor, Tensor, float]:
    """Features (n, …), by what they are divided, and the mean distance of their halves."""
    real = network(targets.x)
    with one_thread():
        is_random = network is see_images
        scale = real.std(dim=0) + SMALLEST_DEVIATION if is_random else torch.ones(())
        scaled, deals = real / scale, _deals(len(real))
        floor = fmean(frechet_between(scaled[one], scaled[other]) for one, other in deals)
    return real, scale, floor


def _deals(num: int) -> list[tuple[Tensor, Tensor]]:
    return [_halves(num, "translation", index) for index in range(_NUM_DEALS)]


def _halves(num: int, *seed: str | int) -> tuple[Tensor, Tensor]:
    """Two halves of so many samples, the same ones every time."""
    generator = torch.Generator().manual_seed(derive_seed(*seed))
    order = torch.randperm(num, generator=generator)
    half = num // 2
    return order[:half], order[half : 2 * half]
