"""Quality and its floor."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.errors import FedwanError
from fedwan.metrics import NUM_DRAWS, measure_quality, measure_translation
from fedwan.metrics.features import NUM_FEATURES, load_classifier
from fedwan.metrics.quality import LEAST_PAIRS, see
from fedwan.workloads.base import Batch

FLOORED = {"fd", "kid", "precision", "recall", "density", "coverage"}


def real_samples(name: str, seed: int) -> tuple[Batch, Tensor]:
    """The held-out data, and as many training samples as a generator would be asked for."""
    train, held_out = find_source(name).load()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(train.x), generator=generator)[: NUM_DRAWS * len(held_out.x)]
    return held_out, train.x[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor"), [("digits", 1.4), ("ring8", 6), ("grid25", 6), ("stacked_digits", 1.4)]
)
def test_a_perfect_generator_stands_at_the_floor(name: str, factor: float) -> None:
    quality = measure_quality(name, *real_samples(name, seed=1))
    if name == "stacked_digits":
        assert min(quality["modes"], quality["modes_floor"]) > 990
        # An even draw of N samples is K / 2N from even, on average.
        assert quality["mode_kl"] == pytest.approx(1000 / (2 * 6000), abs=0.03)
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
        assert math.isclose(sum(quality["histogram"]), 1)
        assert quality["fd"] > 3 * quality["fd_floor"]
        assert quality["kid"] > quality["kid_floor"] + 0.2
        assert quality["coverage"] < quality["coverage_floor"] - 0.05


@pytest.mark.parametrize("name", ["digits", "ring8", "pairs"])
def test_figures_are_ready_for_json_and_the_same_in_any_number_of_threads(
    name: str, targets: Tensor
) -> None:
    texts = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        figures = (
            measure_translation(targets, targets * 0.5)
            if name == "pairs"
            else measure_quality(name, *real_samples(name, seed=1))
        )
        texts.append(json.dumps(figures))
    torch.set_num_threads(before)
    assert texts[0] == texts[1]


def test_samples_of_a_diverged_run_are_refused_with_the_mend() -> None:
    held_out, samples = real_samples("ring8", seed=1)
    samples[0, 0] = math.inf
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_quality("ring8", held_out, samples)
    targets = torch.zeros(LEAST_PAIRS, 3, 8, 8)
    assert measure_translation(targets, targets + 0.25)["l1"] == 0.25
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_translation(targets, targets + math.nan)


def test_a_stack_is_seen_channel_by_channel() -> None:
    source, digits = find_source("stacked_digits"), load_classifier("digits")
    x = source.load()[1].x[:50]
    seen = see(source, x)
    assert seen.features.shape == (50, 3 * NUM_FEATURES)
    middle = seen.features[:, NUM_FEATURES : 2 * NUM_FEATURES]
    torch.testing.assert_close(middle, digits(x[:, 1:2])[0])
    found = see(source, find_source("digits").load()[0].x[:600].repeat(1, 3, 1, 1)).figures
    assert found["modes"] == 10 and found["good"] > 0.9
    assert found["mode_kl"] == pytest.approx(math.log(100), abs=0.02)


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
