"""Density and coverage."""

from __future__ import annotations

import pytest
import torch

from fedwan.metrics.density_coverage import density_coverage

GENERATOR = torch.Generator().manual_seed(0)
LEFT, LEFT_AGAIN, RIGHT = (torch.randn(400, 2, generator=GENERATOR) for _ in range(3))
RIGHT = RIGHT + 100


def test_samples_of_one_distribution_have_both_about_one() -> None:
    found = density_coverage(LEFT, LEFT_AGAIN)
    assert found.density == pytest.approx(1, abs=0.1)
    # Of balls with k of N real samples, 1 - 2^-k hold one of N others (Naeem et al. 2020, 3.2).
    assert found.coverage == pytest.approx(1 - 2**-5, abs=0.03)


def test_a_set_covers_itself() -> None:
    assert density_coverage(LEFT, LEFT).coverage == 1.0


def test_a_generator_that_drops_half_the_modes_covers_half() -> None:
    found = density_coverage(torch.cat([LEFT, RIGHT]), LEFT_AGAIN.repeat(2, 1))
    assert found.coverage == pytest.approx(0.5, abs=0.03)


def test_a_generator_that_invents_a_mode_loses_density_but_not_coverage() -> None:
    found = density_coverage(LEFT, torch.cat([LEFT_AGAIN, RIGHT]))
    assert found.density == pytest.approx(0.5, abs=0.05)
    assert found.coverage > 0.93


def test_samples_that_crowd_the_middle_cover_little_however_dense_they_are() -> None:
    found = density_coverage(LEFT, LEFT_AGAIN * 0.05)
    assert found.density > 0.8
    assert found.coverage < 0.1


def test_values_follow_the_definition_on_a_line() -> None:
    real = torch.tensor([[0.0], [1.0], [3.0], [10.0]])
    generated = torch.tensor([[0.5], [20.0]])
    # With one neighbour radii are 1, 1, 2 and 7; 0.5 lies in the first two balls, 20 in none.
    found = density_coverage(real, generated, k=1)
    assert (found.density, found.coverage) == (1.0, 0.5)


def test_one_real_outlier_does_not_vouch_for_what_lies_about_it() -> None:
    outlier = torch.tensor([[50.0, 0.0]])
    found = density_coverage(torch.cat([LEFT, outlier]), outlier + 5 * LEFT_AGAIN)
    assert found.density < 0.25
    assert found.coverage < 0.01
