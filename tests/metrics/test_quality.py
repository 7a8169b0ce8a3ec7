"""Quality and its floor."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.errors import FedwanError
from fedwan.metrics import NUM_DRAWS, frechet_between, measure_quality
from fedwan.metrics.threads import one_thread
from fedwan.workloads.base import Batch

FLOORED = {"fd", "kid", "precision", "recall", "density", "coverage"}


def real_samples(name: str, seed: int) -> tuple[Batch, Tensor]:
    """The held-out data, and as many training samples as a generator would be asked for."""
    train, held_out = find_source(name).load()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(train.x), generator=generator)[: NUM_DRAWS * len(held_out.x)]
    return held_out, train.x[index]


@cache
def quality_of_real_samples(name: str) -> dict[str, Any]:
    return measure_quality(name, *real_samples(name, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor"), [("digits", 1.4), ("ring8", 6), ("grid25", 6), ("stacked_digits", 1.4)]
)
def test_a_perfect_generator_stands_at_the_floor(name: str, factor: float) -> None:
    quality = quality_of_real_samples(name)
    assert quality["fd_floor"] / factor < quality["fd"] < quality["fd_floor"] * factor
    assert min(quality["precision"], quality["recall"]) > 0.85
    assert quality["kid"] == pytest.approx(quality["kid_floor"], abs=0.1)
    for figure in FLOORED - {"fd", "kid"}:
        assert quality[figure] == pytest.approx(quality[f"{figure}_floor"], abs=0.12)


@pytest.mark.parametrize("name", ["digits", "ring8"])
def test_the_floors_depend_on_the_held_out_data_alone(name: str) -> None:
    held_out, samples = real_samples(name, seed=1)
    good, bad = (measure_quality(name, held_out, x) for x in (samples, samples * 0.1))
    floors = {key for key in good if key.endswith("_floor")}
    assert {f"{figure}_floor" for figure in FLOORED} <= floors
    assert all(good[key] == bad[key] for key in floors)
    assert all(good[figure] != bad[figure] for figure in FLOORED)


def test_blurred_digits_and_missing_digits_stand_far_from_it() -> None:
    held_out, samples = real_samples("digits", seed=1)
    train, _ = find_source("digits").load()
    blurred = torch.nn.functional.avg_pool2d(samples, 3, stride=1, padding=1)
    without_eights = train.x[train.y != 8][: len(samples)]
    for bad in (blurred, without_eights):
        quality = measure_quality("digits", held_out, bad)
        assert quality["fd"] > 3 * quality["fd_floor"]
        assert quality["kid"] > quality["kid_floor"] + 0.2
        assert quality["coverage"] < quality["coverage_floor"] - 0.05


def test_a_generator_of_half_the_digits_covers_half() -> None:
    held_out, _ = real_samples("digits", seed=1)
    train, _ = find_source("digits").load()
    low = train.x[train.y < 5]
    quality = measure_quality("digits", held_out, low.repeat(2, 1, 1, 1)[:1200])
    assert quality["coverage"] == pytest.approx(0.5 * quality["coverage_floor"], abs=0.08)


def test_the_histogram_counts_classes() -> None:
    held_out, _ = real_samples("digits", seed=1)
    train, _ = find_source("digits").load()
    ones = train.x[train.y == 1][:100].repeat(12, 1, 1, 1)
    histogram = measure_quality("digits", held_out, ones)["histogram"]
    assert len(histogram) == 10
    assert histogram[1] > 0.97
    assert math.isclose(sum(histogram), 1)


@pytest.mark.parametrize(("name", "modes"), [("ring8", 8), ("grid25", 25)])
def test_points_are_judged_by_modes_too(name: str, modes: int) -> None:
    quality = quality_of_real_samples(name)
    assert quality["modes"] == quality["modes_floor"] == modes
    assert min(quality["good"], quality["good_floor"]) > 0.97
    assert len(quality["histogram"]) == modes


@pytest.mark.slow
def test_stacked_digits_are_judged_by_a_thousand_modes() -> None:
    quality = quality_of_real_samples("stacked_digits")
    assert min(quality["modes"], quality["modes_floor"]) > 990
    # An even draw of N samples is K / 2N from even, on average.
    expected = pytest.approx(1000 / (2 * 6000), abs=0.03)
    assert (quality["mode_kl"], quality["mode_kl_floor"]) == (expected, expected)
    assert min(quality["good"], quality["good_floor"]) > 0.75
    assert "histogram" not in quality


@pytest.mark.parametrize("name", ["digits", "ring8"])
def test_figures_are_ready_for_json_and_the_same_in_any_number_of_threads(name: str) -> None:
    texts = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        texts.append(json.dumps(measure_quality(name, *real_samples(name, seed=1))))
    torch.set_num_threads(before)
    assert texts[0] == texts[1]


def test_a_network_of_ones_own_takes_the_place_of_the_classifier() -> None:
    held_out, samples = real_samples("digits", seed=1)
    network = torch.nn.Flatten()
    quality = measure_quality("digits", held_out, samples, network)
    assert set(quality) == FLOORED | {f"{figure}_floor" for figure in FLOORED}
    pixels = network(held_out.x)
    draws = network(samples).chunk(NUM_DRAWS)
    with one_thread():  # threads would sum in another order
        expected = sum(frechet_between(pixels, draw) for draw in draws) / NUM_DRAWS
    assert quality["fd"] == pytest.approx(expected, rel=1e-9)


def test_measuring_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    measure_quality("ring8", *real_samples("ring8", seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_samples_of_a_diverged_run_are_refused_with_the_mend() -> None:
    held_out, samples = real_samples("ring8", seed=1)
    samples[0, 0] = math.inf
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_quality("ring8", held_out, samples)
