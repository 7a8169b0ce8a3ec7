"""Quality of images made from given inputs."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.errors import FedwanError
from fedwan.metrics.translation import LEAST_PAIRS, measure_translation


@pytest.fixture(scope="module")
def targets() -> Tensor:
    return find_source("photo_edges").load()[1].x[:, 1:]


def test_who_hits_every_target_stands_at_the_floor(targets: Tensor) -> None:
    quality = measure_translation(targets, targets.clone())
    assert quality["fd"] == pytest.approx(quality["fd_floor"])
    assert quality["l1"] == 0
    assert quality["fd"] > 0


def test_blurred_grey_and_constant_images_stand_far_from_it(targets: Tensor) -> None:
    blurred = torch.nn.functional.avg_pool2d(targets, 5, stride=1, padding=2)
    grey = targets.mean(dim=1, keepdim=True).expand_as(targets)
    constant = targets.mean(dim=(0, 2, 3), keepdim=True).expand_as(targets)
    for bad in (blurred, grey, constant):
        quality = measure_translation(targets, bad)
        assert quality["fd"] > 2 * quality["fd_floor"]
        assert quality["l1"] > 0.01


def test_targets_in_another_order_are_as_good_but_far_off(targets: Tensor) -> None:
    quality = measure_translation(targets, targets.flip(0))
    assert quality["fd"] < 2 * quality["fd_floor"]
    assert quality["l1"] > 0.2


def test_the_distance_is_a_mean_over_pixels() -> None:
    targets = torch.zeros(LEAST_PAIRS, 3, 8, 8)
    quality = measure_translation(targets, torch.full_like(targets, 0.25))
    assert quality["l1"] == 0.25


def test_figures_are_ready_for_json_and_the_same_in_any_number_of_threads(targets: Tensor) -> None:
    texts, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        texts.append(json.dumps(measure_translation(targets, targets * 0.5)))
    torch.set_num_threads(before)
    assert texts[0] == texts[1]


def test_images_of_a_diverged_run_are_refused_with_the_mend(targets: Tensor) -> None:
    bad = targets.clone()
    bad[0, 0, 0, 0] = math.nan
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_translation(targets, bad)
