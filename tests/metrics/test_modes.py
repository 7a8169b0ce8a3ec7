"""Counting modes."""

from __future__ import annotations

import pytest
import torch

from fedwan.data.ring8 import SIGMA, load_ring8, ring8_centres
from fedwan.metrics.modes import count_modes


def test_real_points_hit_all_eight_modes() -> None:
    points = load_ring8()[1].x
    found = count_modes(points, ring8_centres(), SIGMA)
    assert found.modes == 8
    assert found.good == pytest.approx(0.989, abs=0.01)
    assert found.histogram == pytest.approx([0.125] * 8)


def test_a_collapsed_generator_hits_one() -> None:
    found = count_modes(ring8_centres()[3].repeat(100, 1), ring8_centres(), SIGMA)
    assert (found.modes, found.good) == (1, 1.0)
    assert found.histogram[3] == 1.0


def test_points_between_modes_are_not_good() -> None:
    found = count_modes(torch.zeros(100, 2), ring8_centres(), SIGMA)
    assert (found.modes, found.good) == (0, 0.0)
    assert sum(found.histogram) == pytest.approx(1)


def test_a_stray_sample_does_not_find_a_mode() -> None:
    centres = ring8_centres()
    points = torch.cat([centres[0].repeat(999, 1), centres[1:2]])
    assert count_modes(points, centres, SIGMA).modes == 1
