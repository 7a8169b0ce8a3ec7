"""Quality and its floor."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fedwan.data import find_source
from fedwan.errors import FedwanError
from fedwan.metrics import NUM_DRAWS, measure_quality
from fedwan.workloads.base import Batch


def real_samples(name: str, seed: int) -> tuple[Batch, torch.Tensor]:
    """The held-out data, and as many training samples as a generator would be asked for."""
    train, held_out = find_source(name).load()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(train.x), generator=generator)[: NUM_DRAWS * len(held_out.x)]
    return held_out, train.x[index]


@pytest.mark.parametrize(("name", "factor"), [("digits", 1.4), ("ring8", 6)])
def test_a_perfect_generator_stands_at_the_floor(name: str, factor: float) -> None:
    quality = measure_quality(name, *real_samples(name, seed=1))
    assert quality["fd_floor"] / factor < quality["fd"] < quality["fd_floor"] * factor
    assert min(quality["precision"], quality["recall"]) > 0.85


@pytest.mark.parametrize("name", ["digits", "ring8"])
def test_the_floor_depends_on_the_held_out_data_alone(name: str) -> None:
    held_out, samples = real_samples(name, seed=1)
    floors = {measure_quality(name, held_out, x)["fd_floor"] for x in (samples, samples * 0.1)}
    assert len(floors) == 1


def test_blurred_digits_and_missing_digits_stand_far_from_it() -> None:
    held_out, samples = real_samples("digits", seed=1)
    train, _ = find_source("digits").load()
    blurred = torch.nn.functional.avg_pool2d(samples, 3, stride=1, padding=1)
    without_eights = train.x[train.y != 8][: len(samples)]
    for bad in (blurred, without_eights):
        quality = measure_quality("digits", held_out, bad)
        assert quality["fd"] > 3 * quality["fd_floor"]


def test_the_histogram_counts_classes() -> None:
    held_out, _ = real_samples("digits", seed=1)
    train, _ = find_source("digits").load()
    ones = train.x[train.y == 1][:100].repeat(12, 1, 1, 1)
    histogram = measure_quality("digits", held_out, ones)["histogram"]
    assert len(histogram) == 10
    assert histogram[1] > 0.97
    assert math.isclose(sum(histogram), 1)


def test_points_are_judged_by_modes_too() -> None:
    quality = measure_quality("ring8", *real_samples("ring8", seed=1))
    assert quality["modes"] == 8
    assert quality["good"] > 0.97


@pytest.mark.parametrize("name", ["digits", "ring8"])
def test_figures_are_ready_for_json_and_the_same_in_any_number_of_threads(name: str) -> None:
    texts = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        texts.append(json.dumps(measure_quality(name, *real_samples(name, seed=1))))
    torch.set_num_threads(before)
    assert texts[0] == texts[1]


def test_samples_of_a_diverged_run_are_refused_with_the_mend() -> None:
    held_out, samples = real_samples("ring8", seed=1)
    samples[0, 0] = math.inf
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_quality("ring8", held_out, samples)
