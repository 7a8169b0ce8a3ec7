"""How many samples of a shard are not copies of another, from some that are drawn at random.

Where only n of N are looked at, most copies are not seen beside what they copy. What was seen once
(f1) and twice (f2) tells how many were not seen at all: at least f0 = f1^2 / (2 f2 n / (n - 1) +
f1 n / (N - n)), the lower bound of Chao and Lin (2012, "Nonparametric lower bounds for species
richness and shared species richness under sampling without replacement", Biometrics 68), which is
met where all samples have as many copies. One image that is there ten thousand times changes
little of it, as it should; and a few equal pairs, which chance may bring, count for nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedwan.rng import derive_seed

__all__ = ["distinct_share", "pixel_keys"]

COMPARED_AT_ONCE = 64
DEVIATIONS = 2.0
"""By which the number of pairs seen may be too high, as a Poisson number is."""


def pixel_keys(x: Tensor) -> Tensor:
    """A number for each sample of (n, …), the same for equal ones, (n,) float64.

    It is the projection on a fixed random direction, which takes one pass.
    """
    rows = x.flatten(1)
    generator = torch.Generator().manual_seed(derive_seed("vitals", "direction"))
    direction = torch.randn(rows.shape[1], dtype=torch.float64, generator=generator)
    # Summed row by row: a matrix product may round equal rows differently. Few rows at a time:
    # of large images some thousand in float64 are gigabytes.
    parts = [rows[at : at + COMPARED_AT_ONCE] for at in range(0, len(rows), COMPARED_AT_ONCE)]
    return torch.cat([(part.double().cpu() * direction).sum(1) for part in parts])


def distinct_share(keys: Tensor, num_samples: int) -> float:
    """Share of a shard's samples that are no copies: exact if all were looked at, else estimated.

    >>> distinct_share(torch.tensor([1, 2, 2, 3]), 4)
    0.75
    >>> distinct_share(torch.tensor([1, 2, 3]), 1000)
    1.0
    """
    num = len(keys)
    times = torch.unique(keys, return_counts=True)[1]
    found = len(times)
    if found == num:
        return 1.0
    if num >= num_samples:
        return found / num
    once, twice = int((times == 1).sum()), int((times == 2).sum())
    if once:
        sure = max(0.0, twice - DEVIATIONS * math.sqrt(twice))
        unseen = once**2 / (2 * sure * num / (num - 1) + once * num / (num_samples - num))
        return min(1.0, (found + unseen) / num_samples)
    return found / num_samples
