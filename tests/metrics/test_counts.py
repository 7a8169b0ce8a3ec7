"""Nearest neighbours, and modes of a mixture and of stacked images."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedwan.data import find_source
from fedwan.metrics.counts import (
    count_modes,
    count_stacked_modes,
    density_coverage,
    precision_recall,
    radii_of,
)

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


GENERATOR = torch.Generator().manual_seed(0)
LEFT, LEFT_AGAIN, RIGHT = (torch.randn(400, 2, generator=GENERATOR).double() for _ in range(3))
RIGHT = RIGHT + 100
BOTH = torch.cat([LEFT, RIGHT])


class Found(NamedTuple):
    precision: float
    recall: float
    density: float
    coverage: float


def judge(real: Tensor, generated: Tensor, span: int = 3, ball: int = 5) -> Found:
    distances = torch.cdist(generated, real)
    near = radii_of(real, max(span, ball))
    spans = near[:, span - 1], radii_of(generated, span)[:, -1]
    balls = density_coverage(distances, near[:, ball - 1], ball)
    return Found(*precision_recall(distances, *spans), *balls)


def test_radii_are_to_the_nearest_others_in_order_and_a_twin_is_one() -> None:
    assert radii_of(torch.tensor([[0.0], [1.0], [4.0], [6.0]]), 2).tolist() == [
        *([1, 4], [1, 3], [2, 3], [2, 5])
    ]
    twins = radii_of(torch.tensor([[5.0, 5.0], [5.0, 5.0], [8.0, 9.0]]), 2)
    assert twins[:, 0].tolist() == pytest.approx([0, 0, 5], abs=1e-6)


def test_samples_of_one_distribution_have_all_high() -> None:
    found = judge(LEFT, LEFT_AGAIN)
    assert min(found.precision, found.recall) > 0.8
    assert found.density == pytest.approx(1, abs=0.1)
    # Of balls with k of N real samples, 1 - 2^-k hold one of N others (Naeem et al. 2020, 3.2).
    assert found.coverage == pytest.approx(1 - 2**-5, abs=0.03)
    same = judge(LEFT, LEFT)
    assert (same.precision, same.recall, same.coverage) == (1.0, 1.0, 1.0)


def test_a_generator_that_drops_half_the_modes_recalls_and_covers_half() -> None:
    found = judge(BOTH, torch.cat([LEFT_AGAIN, LEFT]))
    assert found.precision > 0.8
    assert found.recall == pytest.approx(0.5, abs=0.05)
    assert found.coverage == pytest.approx(0.5, abs=0.03)


def test_a_generator_that_invents_a_mode_loses_precision_and_density_alone() -> None:
    found = judge(LEFT, torch.cat([LEFT_AGAIN, RIGHT]))
    assert found.precision == pytest.approx(0.5, abs=0.05)
    assert found.density == pytest.approx(0.5, abs=0.05)
    assert found.recall > 0.8 and found.coverage > 0.93


def test_values_follow_the_definition_on_a_line() -> None:
    real, generated = (torch.tensor(x)[:, None] for x in ([0.0, 1.0, 3.0, 10.0], [0.5, 20.0]))
    # With one neighbour radii are 1, 1, 2 and 7; 0.5 lies in the first two balls, 20 in none.
    found = judge(real, generated, span=1, ball=1)
    assert (found.precision, found.density, found.coverage) == (0.5, 1.0, 0.5)
