"""Quality of images made from given inputs: nearness to the targets, and to their distribution.

The n held-out pairs are dealt into two halves, several times over, so that a generator that hit
every target would have fd = fd_floor:

    l1        mean |image - target|, with pixels in [-1, 1]
    fd        distance between the targets of one half and the images for the other's inputs
    fd_floor  distance between the targets of both halves

Features are measured in deviations of the targets' own, so that each counts alike.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedwan.errors import FedwanError
from fedwan.metrics.comparison import SMALLEST_DEVIATION, compare, pack_comparisons
from fedwan.metrics.frechet import frechet_between
from fedwan.metrics.random_features import see_images
from fedwan.metrics.threads import one_thread
from fedwan.rng import derive_seed

__all__ = ["LEAST_PAIRS", "NUM_DEALS", "measure_translation"]

NUM_DEALS = 3
LEAST_PAIRS = 4
"""A half needs two for its covariance."""


def measure_translation(
    targets: Tensor, generated: Tensor, *, with_moments: bool = False
) -> dict[str, Any]:
    """Figures of merit of generated images.

    Args:
        targets: real images (n, 3, height, width), n at least LEAST_PAIRS.
        generated: of the same inputs in the same order and shape.
        with_moments: add `moments`, tensors that several sites' images are compared by.

    Returns:
        JSON-ready but for the moments: `fd`, `fd_floor` and `l1`; lower is better.

    Raises:
        FedwanError: images that are not finite.
    """
    assert targets.shape == generated.shape and len(targets) >= LEAST_PAIRS
    if not torch.isfinite(generated).all():
        raise FedwanError(
            "generated images are not finite: training diverged; "
            "lower the learning rates (inner.NETWORK.lr, outer.NETWORK.lr)"
        )
    with one_thread():
        real, fake = see_images(targets), see_images(generated)
        deals = [_deal(len(targets), index) for index in range(NUM_DEALS)]
        ways = [way for one, other in deals for way in ((one, other), (other, one))]
        moments: dict[str, Any] = {}
        if with_moments:
            parts = [compare(real[one], fake[other], real[other]) for one, other in ways]
            moments["moments"] = pack_comparisons(parts)
        scale = real.std(dim=0) + SMALLEST_DEVIATION
        real, fake = real / scale, fake / scale
        return moments | {
            "fd": fmean(frechet_between(real[one], fake[other]) for one, other in ways),
            "fd_floor": fmean(frechet_between(real[one], real[other]) for one, other in deals),
            "l1": float((generated.cpu() - targets.cpu()).abs().mean()),
        }


def _deal(num: int, index: int) -> tuple[Tensor, Tensor]:
    """Two halves of the pairs, the same ones every time."""
    generator = torch.Generator().manual_seed(derive_seed("translation", index))
    order = torch.randperm(num, generator=generator)
    half = num // 2
    return order[:half], order[half : 2 * half]
