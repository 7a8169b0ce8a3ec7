"""Precision and recall."""

from __future__ import annotations

import pytest
import torch

from fedwan.metrics.precision_recall import precision_recall

GENERATOR = torch.Generator().manual_seed(0)
LEFT, LEFT_AGAIN, RIGHT = (torch.randn(200, 2, generator=GENERATOR) for _ in range(3))
RIGHT = RIGHT + 100


def test_samples_of_one_distribution_have_both_high() -> None:
    found = precision_recall(LEFT, LEFT_AGAIN)
    assert min(found) > 0.8


def test_a_generator_that_drops_a_mode_loses_recall_but_not_precision() -> None:
    found = precision_recall(torch.cat([LEFT, RIGHT]), LEFT_AGAIN)
    assert found.precision > 0.8
    assert found.recall == pytest.approx(0.5, abs=0.05)


def test_a_generator_that_invents_a_mode_loses_precision_but_not_recall() -> None:
    found = precision_recall(LEFT, torch.cat([LEFT_AGAIN, RIGHT]))
    assert found.precision == pytest.approx(0.5, abs=0.05)
    assert found.recall > 0.8


def test_a_generator_that_repeats_one_sample_has_no_recall() -> None:
    found = precision_recall(LEFT, LEFT[:1].repeat(50, 1))
    assert found.precision == 1.0
    assert found.recall < 0.02


def test_the_same_set_has_both_one() -> None:
    assert precision_recall(LEFT, LEFT) == (1.0, 1.0)
