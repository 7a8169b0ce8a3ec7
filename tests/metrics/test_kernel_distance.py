"""The kernel distance."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from fedwan.errors import FedwanError
from fedwan.metrics.kernel_distance import kernel_between, kernel_distance


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


def test_small_samples_are_no_further_apart_than_large_ones() -> None:
    shifted = [
        fmean(
            kernel_between(normal(num, 4, seed), normal(num, 4, 1000 + seed) + 0.5)
            for seed in range(trials)
        )
        for num, trials in ((20, 600), (400, 30))
    ]
    assert shifted[0] == pytest.approx(shifted[1], rel=0.1)


def test_it_has_the_known_value_for_two_points() -> None:
    zeros, ones = torch.zeros(2, 3), torch.ones(5, 3)
    # k(0, 0) = k(0, 1) = 1 and k(1, 1) = (3 / 3 + 1)^3 = 8
    assert kernel_between(zeros, ones) == pytest.approx(1 + 8 - 2)


def test_subsets_of_everything_give_what_all_pairs_give() -> None:
    a, b = normal(50, 4), normal(50, 4, seed=1) + 1
    found = kernel_distance(a, b, num_subsets=3, subset_size=50)
    assert found.mean == pytest.approx(kernel_between(a, b), rel=1e-12)
    assert found.deviation == pytest.approx(0, abs=1e-12)


def test_smaller_subsets_agree_within_their_spread_and_another_seed_draws_others() -> None:
    a, b = normal(300, 4), normal(200, 4, seed=1) + 0.5
    first, again, other = (kernel_distance(a, b, 50, 60, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first.mean == pytest.approx(kernel_between(a, b), abs=3 * first.deviation / 50**0.5)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    kernel_distance(normal(20, 2), normal(20, 2), num_subsets=2, subset_size=10)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("num_subsets", "subset_size"), [(1, 10), (2, 1), (2, 21)], ids=["one", "single", "too many"]
)
def test_subsets_that_cannot_be_drawn_are_refused(num_subsets: int, subset_size: int) -> None:
    with pytest.raises(ValueError, match="take 2 subsets or more, of 2 to 20"):
        kernel_distance(normal(30, 2), normal(20, 2), num_subsets, subset_size)


def test_samples_that_do_not_compare_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(5, 2\) have no kernel distance"):
        kernel_between(normal(1, 2), normal(5, 2))
    with pytest.raises(ValueError, match="as many features"):
        kernel_between(normal(5, 3), normal(5, 2))
    with pytest.raises(FedwanError, match="not finite"):
        kernel_between(normal(5, 2), torch.full((5, 2), float("inf")))
