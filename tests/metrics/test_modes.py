"""Counting modes, of a mixture and of stacked images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedwan.data import find_source
from fedwan.metrics.modes import count_modes, count_stacked_modes

RING = find_source("ring8")
assert RING.mixture is not None
CENTRES, SIGMA = RING.mixture()
ALL = torch.cartesian_prod(*[torch.arange(10)] * 3)


def test_real_points_hit_all_eight_modes() -> None:
    found = count_modes(RING.load()[1].x, CENTRES, SIGMA)
    assert found["modes"] == 8
    assert found["good"] == pytest.approx(0.989, abs=0.01)
    assert found["histogram"] == pytest.approx([0.125] * 8)


def test_a_collapsed_generator_hits_one_and_a_stray_sample_finds_no_other() -> None:
    points = torch.cat([CENTRES[3].repeat(999, 1), CENTRES[1:2]])
    found = count_modes(points, CENTRES, SIGMA)
    assert (found["modes"], found["good"], found["histogram"][3]) == (1, 1.0, 0.999)


def test_points_between_modes_are_not_good() -> None:
    found = count_modes(torch.zeros(100, 2), CENTRES, SIGMA)
    assert (found["modes"], found["good"]) == (0, 0.0)
    assert sum(found["histogram"]) == pytest.approx(1)


def certain(labels: Tensor) -> Tensor:
    """Probabilities of a classifier without doubts, labels (N, channels)."""
    return one_hot(labels, 10).double()


@pytest.mark.parametrize(
    ("labels", "modes", "mode_kl"),
    [
        (ALL, 1000, 0),
        (ALL[:500].repeat(4, 1), 500, math.log(2)),
        (ALL[123:124].repeat(50, 1), 1, math.log(1000)),
        (torch.tensor([[1, 2, 3], [3, 2, 1]]), 2, math.log(500)),
    ],
    ids=["one of each", "half", "collapsed", "permuted channels"],
)
def test_stacked_modes_and_their_distance_from_even(
    labels: Tensor, modes: int, mode_kl: float
) -> None:
    found = count_stacked_modes(certain(labels))
    assert found == {"modes": modes, "mode_kl": pytest.approx(mode_kl, abs=1e-12), "good": 1.0}


def test_a_sample_is_good_if_all_its_channels_are() -> None:
    probabilities = certain(ALL[:4])
    doubt = torch.full((10,), 0.1)
    probabilities[0, 2] = doubt
    probabilities[1, :] = doubt
    assert count_stacked_modes(probabilities)["good"] == 0.5
