"""Modes of stacked images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedwan.metrics.stacked_modes import count_stacked_modes

ALL = torch.cartesian_prod(*[torch.arange(10)] * 3)


def certain(labels: Tensor) -> Tensor:
    """Probabilities of a classifier without doubts, labels (N, channels)."""
    return one_hot(labels, 10).double()


def test_one_of_each_finds_all_evenly() -> None:
    assert count_stacked_modes(certain(ALL)) == (1000, pytest.approx(0, abs=1e-12), 1.0)


def test_a_generator_of_half_the_modes_is_log_two_from_even() -> None:
    found = count_stacked_modes(certain(ALL[:500].repeat(4, 1)))
    assert found.modes == 500
    assert found.mode_kl == pytest.approx(math.log(2))


def test_a_collapsed_generator_is_as_far_from_even_as_can_be() -> None:
    found = count_stacked_modes(certain(ALL[123:124].repeat(50, 1)))
    assert found.modes == 1
    assert found.mode_kl == pytest.approx(math.log(1000))


def test_permuted_channels_are_another_mode() -> None:
    assert count_stacked_modes(certain(torch.tensor([[1, 2, 3], [3, 2, 1]]))).modes == 2


def test_a_sample_is_good_if_all_its_channels_are() -> None:
    probabilities = certain(ALL[:4])
    doubt = torch.full((10,), 0.1)
    probabilities[0, 2] = doubt
    probabilities[1, :] = doubt
    assert count_stacked_modes(probabilities).good == 0.5
