"""Quality of generated samples against held-out real data, with the floor that real data reach.

The Frechet distance of small samples is biased upwards, so a figure means something only beside its
floor, and only if both were taken the same way. Here, with n held-out samples:

    fd        distance between the n held-out samples and n generated ones
    fd_floor  distance between the n held-out samples and n of the real training split

each the mean over `NUM_DRAWS` disjoint draws of n. A perfect generator has fd = fd_floor. Of files
there is no public training split: their held-out samples are dealt into two halves, the second
takes its part, and they are seen through `fedwan.metrics.random_features`. Every
other figure has a floor taken as the figure is, whether lower is better or higher. Compare `kid`
with its own, too: held-out data with as many of each class put both below zero (digits: by 0.08).
"""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedwan.data import FILE_NAMES, find_source
from fedwan.errors import FedwanError
from fedwan.metrics.comparison import SMALLEST_DEVIATION, compare, pack_comparisons
from fedwan.metrics.density_coverage import density_coverage_within
from fedwan.metrics.features import Features, Seen, see, see_through
from fedwan.metrics.frechet import frechet_distance, moments
from fedwan.metrics.kernel_distance import kernel_between
from fedwan.metrics.neighbours import Neighbours, find_neighbours
from fedwan.metrics.precision_recall import precision_recall_within
from fedwan.metrics.random_features import see_images
from fedwan.metrics.threads import one_thread
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["NUM_DRAWS", "measure_quality"]

NUM_DRAWS = 3
"""Draws that `fd` and `kid` average over; the spread of one alone would be about a fifth."""

_SPAN = 3  # neighbours in precision and recall, as in Kynkaanniemi et al. 2019
_BALL = 5  # neighbours in density and coverage, as in Naeem et al. 2020


def measure_quality(
    data_name: str, real: Batch, generated: Tensor, features: Features | None = None
) -> dict[str, Any]:
    """Figures of merit of generated samples.

    Args:
        data_name: as in `data.name`.
        real: held-out data, x (n, …), n > 5; of files n > 11.
        generated: samples, (NUM_DRAWS * n, …), of the same shape and scale.
        features: a network of your own to see samples through, on the device of `generated`; None
            takes the data's own: points themselves, 8x8 images through the built-in classifier,
            files through random features, in deviations of the held-out ones'.

    Returns:
        JSON-ready: `fd` and `kid` (lower is better; `kid` may be negative), `precision`, `recall`,
        `density` and `coverage` (higher is better), and the floor of each under its name with
        `_floor`. Without `features` also what the data allow, all but `histogram` with floors:

        - `histogram`: share of samples per class or mode; not of stacked images
        - `modes`: modes found, and `good`: share of samples near a mode or classified with
          confidence; of mixtures (ring8, grid25) and stacked images
        - `mode_kl`: from the modes' histogram to an even one, in nats; of stacked images

        And of files `moments`, which are tensors: see `fedwan.metrics.comparison`.

    Raises:
        FedwanError: samples that are not finite.
        ValueError: images that need `features`, or features of a wrong shape.
    """
    num = len(real.x)
    assert generated.shape == (NUM_DRAWS * num, *real.x.shape[1:])
    if not torch.isfinite(generated).all():
        raise FedwanError(
            "generated samples are not finite: training diverged; "
            "lower the learning rates (inner.NETWORK.lr, outer.NETWORK.lr)"
        )
    with one_thread():
        moments: dict[str, Any] = {}
        if data_name in FILE_NAMES:
            held_out, fake, reference, moments = _see_halves(real.x, generated, features)
        elif features is None:
            source = find_source(data_name)
            held_out, fake = see(source, real.x), see(source, generated)
            reference = _see_training(data_name, num)
        else:
            draws = (real.x, generated, _draw_training(data_name, num))
            held_out, fake, reference = (
                see_through(features, x.to(generated.device)) for x in draws
            )
        near = find_neighbours(held_out.features, _BALL)
        figures = _figures(near, fake)
        floors = _figures(near, reference)
        floors.pop("histogram", None)
        return figures | {f"{name}_floor": value for name, value in floors.items()} | moments


def _figures(held_out: Neighbours, seen: Seen) -> dict[str, Any]:
    """All figures of samples that are seen as features (draws * n, …), n being held out."""
    num = len(held_out.points)
    draws = seen.features.chunk(len(seen.features) // num)
    of_held_out = moments(held_out.points)
    return {
        "fd": fmean(frechet_distance(of_held_out, moments(draw)) for draw in draws),
        "kid": fmean(kernel_between(held_out.points, draw) for draw in draws),
        **_spread(held_out, find_neighbours(draws[0], _SPAN)),
        **seen.figures,
    }


def _spread(held_out: Neighbours, drawn: Neighbours) -> dict[str, float]:
    """Precision, recall, density and coverage, of n samples."""
    distances = torch.cdist(drawn.points, held_out.points)
    manifolds = precision_recall_within(distances, held_out.radii(_SPAN), drawn.radii(_SPAN))
    balls = density_coverage_within(distances, held_out.radii(_BALL), _BALL)
    return manifolds._asdict() | balls._asdict()


def _see_halves(
    real: Tensor, generated: Tensor, features: Features | None
) -> tuple[Seen, Seen, Seen, dict[str, Any]]:
    """Half of the real samples, as many generated ones several times over, and the other half.

    And what several sites' samples are compared by, see `fedwan.metrics.comparison`.
    """
    generator = torch.Generator().manual_seed(derive_seed("halves", len(real)))
    order = torch.randperm(len(real), generator=generator)
    half = len(real) // 2
    draws = (real[order[:half]], generated[: NUM_DRAWS * half], real[order[half : 2 * half]])
    if features is None:
        one, fake, other = (see_images(x) for x in draws)
    else:
        one, fake, other = (see_through(features, x.to(generated.device)).features for x in draws)
    comparisons = [compare(one, draw, other) for draw in fake.chunk(NUM_DRAWS)]
    scale = torch.cat([one, other]).std(dim=0) + SMALLEST_DEVIATION
    seen = [Seen(x / scale, {}) for x in (one, fake, other)]
    return seen[0], seen[1], seen[2], {"moments": pack_comparisons(comparisons)}


@lru_cache(maxsize=4)
def _see_training(data_name: str, num: int) -> Seen:
    """A run measures many times, each time beside the same training samples."""
    return see(find_source(data_name), _draw_training(data_name, num))


def _draw_training(data_name: str, num: int) -> Tensor:
    """Samples of the public training split, (draws * num, …), the same ones every time."""
    train, _ = find_source(data_name).load()
    draws = min(NUM_DRAWS, len(train.x) // num)
    assert draws > 0
    generator = torch.Generator().manual_seed(derive_seed(data_name, "floor"))
    return train.x[torch.randperm(len(train.x), generator=generator)[: draws * num]]
