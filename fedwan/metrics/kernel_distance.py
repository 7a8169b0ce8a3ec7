"""Kernel distance between two samples of features (Binkowski et al. 2018, section 4): KID.

The squared maximum mean discrepancy with the kernel k(x, y) = (x.y / d + 1)^3, d the number of
features, estimated without bias (Gretton et al. 2012, equation 3):

    mean over i != j of k(a_i, a_j)  +  the same of b  -  2 mean over i, j of k(a_i, b_j)

Unlike the Frechet distance it is not biased upwards in small samples; for two samples of one
distribution it lies about zero, on either side. That needs samples drawn at random: one with as
many of each class holds fewer pairs of a class than chance would bring, and puts it below zero.
"""

from __future__ import annotations

from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.errors import FedwanError
from fedwan.rng import derive_seed

__all__ = ["KernelDistance", "kernel_between", "kernel_distance"]


class KernelDistance(NamedTuple):
    """What `kernel_distance` finds."""

    mean: float
    """Over the subsets; an estimate without bias, so it may be negative."""
    deviation: float
    """Standard deviation over the subsets; they overlap, so it is no error of the mean."""


def kernel_between(a: Tensor, b: Tensor) -> float:
    """Squared kernel distance of two samples of features, (N, features) and (M, features).

    Raises:
        FedwanError: a value is not finite, as after a divergence.
        ValueError: a sample has fewer than two members, or the numbers of features differ.
    """
    if min(len(a), len(b)) < 2 or a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"samples of shape {tuple(a.shape)} and {tuple(b.shape)} have no kernel distance; "
            "take two or more of each, with as many features"
        )
    a, b = (x.detach().to("cpu", torch.float64) for x in (a, b))
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise FedwanError("the kernel distance is undefined: a sample holds values not finite")
    return _mean_of_pairs(a) + _mean_of_pairs(b) - 2 * float(_kernel(a, b).mean())


def kernel_distance(
    a: Tensor, b: Tensor, num_subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> KernelDistance:
    """Squared kernel distance as papers report it: over random subsets of both samples.

    It costs memory for subsets alone, where `kernel_between` takes all pairs at once.

    Args:
        a: (N, features).
        b: (M, features).
        num_subsets: 2 or more.
        subset_size: of each sample, drawn without replacement; from 2 to the smaller sample.
        seed: of a generator of its own; torch's global one is left alone.

    Raises:
        FedwanError: a value is not finite, as after a divergence.
        ValueError: too few subsets, or a size that the samples do not bear.
    """
    smaller = min(len(a), len(b))
    if num_subsets < 2 or not 2 <= subset_size <= smaller:
        raise ValueError(
            f"num_subsets={num_subsets} and subset_size={subset_size} do not suit samples of "
            f"{len(a)} and {len(b)}; take 2 subsets or more, of 2 to {smaller}"
        )
    generator = torch.Generator().manual_seed(derive_seed("kernel distance", seed))
    found = [
        kernel_between(*(_choose(x, subset_size, generator) for x in (a, b)))
        for _ in range(num_subsets)
    ]
    return KernelDistance(fmean(found), stdev(found))


def _choose(x: Tensor, num: int, generator: torch.Generator) -> Tensor:
    return x[torch.randperm(len(x), generator=generator)[:num].to(x.device)]


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T).div_(x.shape[1]).add_(1).pow_(3)  # in place: a third of the time


def _mean_of_pairs(x: Tensor) -> float:
    """Of the kernel of two different members."""
    kernel = _kernel(x, x)
    return float(kernel.sum() - kernel.trace()) / (len(x) * (len(x) - 1))
