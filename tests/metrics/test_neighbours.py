"""Figures by nearest neighbours."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedwan.metrics.neighbours import density_coverage, precision_recall, radii_of

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
