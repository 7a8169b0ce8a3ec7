"""The kernel distance."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from fedwan.metrics.kernel_distance import kernel_between


def normal(num: int, features: int, seed: int = 0) -> Tensor:
    return torch.randn(num, features, generator=torch.Generator().manual_seed(seed))


def by_hand(a: Tensor, b: Tensor) -> float:
    """The definition, one pair at a time."""
    d = a.shape[1]

    def mean(x: Tensor, y: Tensor, same: bool) -> float:
        return fmean(
            (sum(p * q for p, q in zip(u, v, strict=True)) / d + 1) ** 3
            for i, u in enumerate(x.tolist())
            for j, v in enumerate(y.tolist())
            if not (same and i == j)
        )

    return mean(a, a, True) + mean(b, b, True) - 2 * mean(a, b, False)


def test_it_agrees_with_the_definition_pair_by_pair() -> None:
    a, b = normal(12, 5), normal(9, 5, seed=1) * 1.5 + 0.3
    assert kernel_between(a, b) == pytest.approx(by_hand(a, b), rel=1e-12)


def test_of_one_distribution_it_is_zero_on_average_and_often_negative() -> None:
    found = [kernel_between(*normal(80, 4, seed).chunk(2)) for seed in range(400)]
    assert abs(fmean(found)) < 3 * stdev(found) / 400**0.5
    assert sum(value < 0 for value in found) > 100


def test_it_has_the_known_value_for_two_points() -> None:
    zeros, ones = torch.zeros(2, 3), torch.ones(5, 3)
    # k(0, 0) = k(0, 1) = 1 and k(1, 1) = (3 / 3 + 1)^3 = 8
    assert kernel_between(zeros, ones) == pytest.approx(1 + 8 - 2)
