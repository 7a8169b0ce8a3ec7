"""Scores that need no scale, where the answer is known."""

from __future__ import annotations

import pytest
import torch

from fedwan.workloads.examination import share_above, spread


def test_a_share_is_one_where_all_are_above_and_half_where_nothing_differs() -> None:
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0, 4.0])
    assert float(share_above(high, low)) == 1.0 and float(share_above(low, high)) == 0.0
    assert float(share_above(torch.zeros(5), torch.zeros(3))) == 0.5


def test_spread_is_the_mean_distance_between_two_different_samples() -> None:
    assert float(spread(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))) == pytest.approx(5.0)
    assert float(spread(torch.ones(8, 1, 4, 4))) == 0.0


def test_spread_of_what_is_nearly_alike_is_not_lost_to_rounding() -> None:
    base = torch.full((2, 1000), 10.0)
    base[1, 0] += 1e-3
    assert float(spread(base)) == pytest.approx(1e-3, rel=1e-2)
