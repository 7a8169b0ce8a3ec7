"""Quality of generated samples against held-out real data, with the floor that real data reach.

The Frechet distance of small samples is biased upwards, so a figure means something only beside its
floor, taken the same way: `fd` is the distance between the n held-out samples and n generated ones,
`fd_floor` between them and n of the real training split, each the mean over `NUM_DRAWS` disjoint
draws. A perfect generator has fd = fd_floor. Of files, and of a recipe's own pictures, there is no
public training split: their held-out samples are dealt into two halves, seen through random
features in deviations of their own, or through the network that `eval.features` names, as it gives
them.

Every other figure has a floor taken as the figure is. Compare `kid` with its own, too: held-out
data with as many of each class put both below zero (digits: by 0.08).
"""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedwan.data import Source, find_source
from fedwan.data.sources import SOURCES
from fedwan.errors import FedwanError
from fedwan.metrics.distances import (
    SMALLEST_DEVIATION,
    compare,
    frechet_between,
    frechet_distance,
    kernel_between,
    moments,
    pack_comparisons,
)
from fedwan.metrics.features import load_classifier, one_thread, see_images
from fedwan.metrics.network import Network, load_network
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

NUM_DRAWS = 3
"""Draws that `fd` and `kid` average over; the spread of one alone would be about a fifth."""
_NUM_DEALS = 3
_SPAN = 3  # neighbours in precision and recall, as in Kynkaanniemi et al. 2019
_BALL = 5  # neighbours in density and coverage, as in Naeem et al. 2020
_FEW = 6  # samples below which there are no such neighbours, and a mean says much of each
_MANY = 500  # samples below which precision and recall say little


def radii_of(points: Tensor, most: int) -> Tensor:
    """Distances of each point to its nearest others, nearest first: (N, features) -> (N, most)."""
    assert len(points) > most
    distances = torch.cdist(points, points)
    distances.fill_diagonal_(0)  # rounding must not make a point its own neighbour
    return distances.topk(most + 1, dim=1, largest=False).values[:, 1:]


def neighbours(
    real: Tensor, generated: Tensor, span: int = _SPAN, ball: int = _BALL
) -> dict[str, float]:
    """Figures of generated samples (M, features) among real ones (N, features), and these in them.

    Shares of generated samples in real balls, `precision`, and of real ones in generated balls,
    `recall`, which reach to a sample's neighbour number `span` (Kynkaanniemi et al. 2019, section
    2). Of real balls that reach to number `ball`: how many a generated sample lies in, over `ball`,
    `density`, about 1 for the real distribution; and the share with one, `coverage` (Naeem et al.
    2020, equations 2 and 3): one stray generated sample does not cover much.
    """
    distances, near = torch.cdist(generated, real), radii_of(real, max(span, ball))
    in_real, in_ball = (distances <= near[:, number - 1] for number in (span, ball))
    in_generated = distances <= radii_of(generated, span)[:, -1:]
    return {
        "precision": float(in_real.any(dim=1).double().mean()),
        "recall": float(in_generated.any(dim=0).double().mean()),
        "density": float(in_ball.sum() / (ball * len(generated))),
        "coverage": float(in_ball.any(dim=0).double().mean()),
    }


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


class Seen(NamedTuple):
    """Samples as the metrics see them: (N, features), and figures specific to the data."""

    features: Tensor
    figures: dict[str, Any]


def measure_quality(
    data_name: str, real: Batch, generated: Tensor, features: str = ""
) -> dict[str, Any]:
    """Figures of `num_generated` samples beside n held-out ones, n > 0.

    Of one picture of files, or of one's own data set (`data_name` ''), there are none, nor of what
    is no picture.

    They are seen through the network at the path `features`, if one is given
    (`fedwan.metrics.network`).

    JSON-ready: `num_real`, real samples that a draw is compared with; `fd` and `kid` (lower is
    better; `kid` may be negative), `precision`, `recall`, `density` and `coverage` (higher is
    better), what the data allow of `histogram`, `modes` and `good`, and the floor of each but
    `histogram` under its name with `_floor`. Of files seen through random features also `moments`,
    tensors (`fedwan.metrics.distances`). With `num_real` below 500 there are neither `precision`
    nor `recall`, below 6 neither moments nor `density` and `coverage`, at 1 no `kid`. A
    `FedwanError` if samples are not finite.
    """
    num = len(real.x)
    is_own = data_name not in SOURCES
    if is_own and (num < 2 or real.x.dim() != 4 or real.x.shape[1] not in (1, 3)):
        return {}
    assert generated.shape == (num_generated(data_name, num), *real.x.shape[1:])
    _refuse_diverged(generated)
    network = load_network(features, generated.device) if features else None
    with one_thread():
        packed: dict[str, Any] = {}
        if is_own:
            held_out, fake, reference, packed = _see_halves(real.x, generated, network)
        else:
            held_out, fake = (see(find_source(data_name), x, network) for x in (real.x, generated))
            reference = _see_training(data_name, num, network)
        points = held_out.features.detach().to("cpu", torch.float64)
        figures, floors = (_figures(points, seen) for seen in (fake, reference))
        floors.pop("histogram", None)
        packed["num_real"] = len(points)
        return figures | {f"{name}_floor": value for name, value in floors.items()} | packed


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
    with one_thread():
        network = load_network(features, generated.device) if features else see_images
        real, fake = network(targets), network(generated)
        deals = [_halves(len(targets), "translation", index) for index in range(_NUM_DEALS)]
        ways = [way for one, other in deals for way in ((one, other), (other, one))]
        packed: dict[str, Any] = {}
        if with_moments and not features and half >= _FEW:
            parts = [compare(real[one], fake[other], real[other]) for one, other in ways]
            packed["moments"] = pack_comparisons(parts)
        if not features:
            scale = real.std(dim=0) + SMALLEST_DEVIATION
            real, fake = real / scale, fake / scale
        return packed | {
            "num_real": half,
            "fd": fmean(frechet_between(real[one], fake[other]) for one, other in ways),
            "fd_floor": fmean(frechet_between(real[one], real[other]) for one, other in deals),
            "l1": l1,
        }


def see(source: Source, x: Tensor, network: Network | None = None) -> Seen:
    """Samples (N, …): points themselves, images through a network, else their own classifier."""
    if source.mixture is not None:
        points = x.detach().cpu()
        return Seen(points, count_modes(points, *source.mixture()))
    if network is not None:
        return Seen(network(x), {})
    features, logits = load_classifier(source.name)(x)
    counts = torch.bincount(logits.argmax(dim=1), minlength=source.num_classes).double()
    return Seen(features, {"histogram": (counts / len(x)).tolist()})


def _refuse_diverged(generated: Tensor) -> None:
    if not torch.isfinite(generated).all():
        raise FedwanError(
            "generated samples are not finite: training diverged; "
            "lower the learning rates (inner.NETWORK.lr, outer.NETWORK.lr)"
        )


def _figures(held_out: Tensor, seen: Seen) -> dict[str, Any]:
    """All figures of features (draws * n, …), n being held out, that so many samples have."""
    draws = seen.features.chunk(len(seen.features) // len(held_out))
    of_held_out = moments(held_out)
    figures = {"fd": fmean(frechet_distance(of_held_out, moments(draw)) for draw in draws)}
    if len(held_out) > 1:
        figures["kid"] = fmean(kernel_between(held_out, draw) for draw in draws)
    if len(held_out) >= _FEW:
        near = neighbours(held_out, draws[0].detach().to("cpu", torch.float64))
        told = near if len(held_out) >= _MANY else ("density", "coverage")
        figures |= {name: near[name] for name in told}
    return figures | seen.figures


def _see_halves(
    real: Tensor, generated: Tensor, network: Network | None
) -> tuple[Seen, Seen, Seen, dict[str, Any]]:
    """Half of the real samples, generated ones, the other half, and what sites compare by."""
    first, second = _halves(len(real), "halves", len(real))
    draws = (real[first], generated, real[second])
    if network is not None:
        first_half, made, second_half = (Seen(network(x), {}) for x in draws)
        return first_half, made, second_half, {}
    one, fake, other = (see_images(x) for x in draws)
    packed: dict[str, Any] = {}
    if len(one) >= _FEW:
        parts = [compare(one, draw, other) for draw in fake.chunk(NUM_DRAWS)]
        packed["moments"] = pack_comparisons(parts)
    scale = torch.cat([one, other]).std(dim=0) + SMALLEST_DEVIATION
    seen = [Seen(x / scale, {}) for x in (one, fake, other)]
    return seen[0], seen[1], seen[2], packed


def _halves(num: int, *seed: str | int) -> tuple[Tensor, Tensor]:
    """Two halves of so many samples, the same ones every time."""
    generator = torch.Generator().manual_seed(derive_seed(*seed))
    order = torch.randperm(num, generator=generator)
    half = num // 2
    return order[:half], order[half : 2 * half]


@lru_cache(maxsize=4)
def _see_training(data_name: str, num: int, network: Network | None) -> Seen:
    """Samples of the public training split, (draws * num, …), the same ones every time."""
    source = find_source(data_name)
    train, _ = source.load()
    draws = min(NUM_DRAWS, len(train.x) // num)
    assert draws > 0
    generator = torch.Generator().manual_seed(derive_seed(data_name, "floor"))
    drawn = torch.randperm(len(train.x), generator=generator)[: draws * num]
    return see(source, train.x[drawn], network)
