"""Quality and its floor, neighbours and modes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.errors import FedwanError
from fedwan.metrics import NUM_DRAWS, measure_quality, measure_translation
from fedwan.metrics.quality import count_modes, neighbours, num_generated, radii_of
from fedwan.workloads.base import Batch

RING = find_source("ring8")
assert RING.mixture is not None
CENTRES, SIGMA = RING.mixture()


def test_real_points_hit_all_eight_modes_and_a_collapsed_generator_one() -> None:
    found = count_modes(RING.load()[1].x, CENTRES, SIGMA)
    assert found["modes"] == 8
    assert found["good"] == pytest.approx(0.989, abs=0.01)
    assert found["histogram"] == pytest.approx([0.125] * 8)
    # A stray sample finds no other.
    found = count_modes(torch.cat([CENTRES[3].repeat(999, 1), CENTRES[1:2]]), CENTRES, SIGMA)
    assert (found["modes"], found["good"], found["histogram"][3]) == (1, 1.0, 0.999)


GENERATOR = torch.Generator().manual_seed(0)
LEFT, LEFT_AGAIN, RIGHT = (torch.randn(400, 2, generator=GENERATOR).double() for _ in range(3))
RIGHT = RIGHT + 100
BOTH = torch.cat([LEFT, RIGHT])


def test_radii_are_to_the_nearest_others_in_order_and_a_twin_is_one() -> None:
    assert radii_of(torch.tensor([[0.0], [1.0], [4.0], [6.0]]), 2).tolist() == [
        *([1, 4], [1, 3], [2, 3], [2, 5])
    ]
    twins = radii_of(torch.tensor([[5.0, 5.0], [5.0, 5.0], [8.0, 9.0]]), 2)
    assert twins[:, 0].tolist() == pytest.approx([0, 0, 5], abs=1e-6)


def test_a_generator_that_drops_half_the_modes_recalls_and_covers_half() -> None:
    found = neighbours(BOTH, torch.cat([LEFT_AGAIN, LEFT]))
    assert found["precision"] > 0.8
    assert found["recall"] == pytest.approx(0.5, abs=0.05)
    assert found["coverage"] == pytest.approx(0.5, abs=0.03)


def test_values_follow_the_definition_on_a_line() -> None:
    real, generated = (torch.tensor(x)[:, None] for x in ([0.0, 1.0, 3.0, 10.0], [0.5, 20.0]))
    # With one neighbour real radii are 1, 1, 2 and 7; 0.5 lies in the first two balls, 20 in none.
    # Generated ones are 19.5: the ball of 0.5 holds all, that of 20 the last alone.
    expected = {"precision": 0.5, "recall": 1.0, "density": 1.0, "coverage": 0.5}
    assert neighbours(real, generated, span=1, ball=1) == expected


FLOORED = {"fd", "kid", "density", "coverage"}


def real_samples(name: str, seed: int) -> tuple[Batch, Tensor]:
    """The held-out data, and as many training samples as a generator would be asked for."""
    train, held_out = find_source(name).load()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(train.x), generator=generator)[: NUM_DRAWS * len(held_out.x)]
    return held_out, train.x[index]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("digits", 1.4), ("ring8", 6)])
def test_a_perfect_generator_stands_at_the_floor(name: str, factor: float) -> None:
    quality = measure_quality(name, *real_samples(name, seed=1))
    assert quality["fd_floor"] / factor < quality["fd"] < quality["fd_floor"] * factor
    assert quality["coverage"] > 0.85
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
    targets = torch.zeros(1, 3, 8, 8)
    assert measure_translation(targets, targets + 0.25)["l1"] == 0.25
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_translation(targets, targets + math.nan)


@pytest.mark.parametrize("half", [499, 500])
def test_precision_and_recall_are_told_from_500_samples_on(half: int) -> None:
    real, made = (torch.randn(n, 3, 8, 8, generator=GENERATOR) for n in (2 * half, 3 * half))
    found = measure_quality("folder", Batch(real, torch.zeros(2 * half)), made)
    assert found["num_real"] == half and "density" in found
    told = {"precision", "recall", "precision_floor", "recall_floor"}
    assert told & found.keys() == (told if half == 500 else set())


@pytest.mark.parametrize("num", range(1, 13))
@pytest.mark.parametrize("name", ["ring8", "folder", "pairs"])
def test_of_few_samples_those_figures_are_left_out_that_need_more(name: str, num: int) -> None:
    real, made = (torch.randn(n, 3, 8, 8, generator=GENERATOR) for n in (num, 3 * num))
    if name == "pairs":
        found = measure_translation(real, made[:num], with_moments=True)
    else:
        x = (real, made[: num_generated(name, num)])
        one, other = (part[:, 0, 0, :2] for part in x) if name == "ring8" else x
        found = measure_quality(name, Batch(one, torch.zeros(num, dtype=torch.int64)), other)
    half = num if name == "ring8" else num // 2
    assert found.get("num_real", 0) == half and ("fd" in found) == (half > 0)
    assert ("kid" in found) == (half > 1 and name != "pairs")
    assert ("coverage" in found) == ("density_floor" in found) == (half > 5 and name != "pairs")
    assert ("moments" in found) == (half > 5 and name != "ring8")
    assert all(math.isfinite(found[key]) for key in found.keys() - {"histogram", "moments"})


@pytest.fixture(scope="module")
def targets() -> Tensor:
    return find_source("photo_edges").load()[1].x[:, 1:]


def test_who_hits_every_target_stands_at_the_floor_and_blurred_or_grey_images_far_from_it(
    targets: Tensor,
) -> None:
    quality = measure_translation(targets, targets.clone())
    assert 0 < quality["fd"] == pytest.approx(quality["fd_floor"])
    assert quality["l1"] == 0
    blurred = torch.nn.functional.avg_pool2d(targets, 5, stride=1, padding=2)
    grey = targets.mean(dim=1, keepdim=True).expand_as(targets)
    constant = targets.mean(dim=(0, 2, 3), keepdim=True).expand_as(targets)
    for bad in (blurred, grey, constant):
        quality = measure_translation(targets, bad)
        assert quality["fd"] > 2 * quality["fd_floor"]
        assert quality["l1"] > 0.01
