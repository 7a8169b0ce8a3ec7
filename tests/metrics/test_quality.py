"""Quality and its floor, neighbours and modes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.errors import FedwanError
from fedwan.metrics import NUM_DRAWS, measure_quality, measure_translation
from fedwan.metrics.quality import count_modes, num_generated
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


@pytest.mark.parametrize("name", ["digits", "ring8"])
def test_the_floor_depends_on_the_held_out_data_alone(name: str) -> None:
    held_out, samples = real_samples(name, seed=1)
    good, bad = (measure_quality(name, held_out, x) for x in (samples, samples * 0.1))
    assert good["fd_floor"] == bad["fd_floor"] and good["fd"] != bad["fd"]


def test_blurred_digits_and_missing_digits_stand_far_from_it() -> None:
    held_out, samples = real_samples("digits", seed=1)
    train, _ = find_source("digits").load()
    blurred = torch.nn.functional.avg_pool2d(samples, 3, stride=1, padding=1)
    without_eights = train.x[train.y != 8][: len(samples)]
    for bad in (blurred, without_eights):
        quality = measure_quality("digits", held_out, bad)
        assert math.isclose(sum(quality["histogram"]), 1)
        assert quality["fd"] > 3 * quality["fd_floor"]


@pytest.mark.parametrize("name", ["digits", "ring8", "pairs"])
def test_figures_are_ready_for_json_and_the_same_in_any_number_of_threads(
    name: str, targets: Tensor
) -> None:
    texts = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        figures = (
            measure_translation(targets, targets * 0.5)
            if name == "pairs"
            else measure_quality(name, *real_samples(name, seed=1))
        )
        texts.append(json.dumps(figures))
    assert texts[0] == texts[1]


def test_a_network_of_the_users_own_runs_in_as_many_threads_as_torch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def see(x: Tensor) -> Tensor:
        threads.append(torch.get_num_threads())
        return x.flatten(1)[:, :4]

    monkeypatch.setattr("fedwan.metrics.quality.load_network", lambda *_: see)
    torch.set_num_threads(3)
    x = torch.randn(12, 3, 8, 8, generator=GENERATOR)
    measure_quality("folder", Batch(x, torch.zeros(12)), x.repeat(2, 1, 1, 1)[:18], "net")
    measure_translation(x, x, "net")
    held_out, samples = real_samples("digits", seed=1)
    measure_quality("digits", held_out, samples, "net")
    assert set(threads) == {3} and torch.get_num_threads() == 3


def test_what_held_out_samples_and_features_decide_is_computed_once_for_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    roots: list[int] = []
    eigh = torch.linalg.eigh

    def see(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.flatten(1)[:, :4]

    def count(x: Tensor) -> Any:
        roots.append(len(x))
        return eigh(x)

    monkeypatch.setattr("fedwan.metrics.quality.load_network", lambda *_: see)
    monkeypatch.setattr("torch.linalg.eigh", count)
    x = torch.randn(12, 3, 8, 8, generator=GENERATOR)
    for real, expected in ((x, [6, 6, 18]), (x.clone(), [18]), (-x, [6, 6, 18])):
        seen.clear()
        roots.clear()
        measure_quality("folder", Batch(real, torch.zeros(12)), torch.cat([x, x])[:18], "net")
        assert sorted(seen) == expected and len(roots) == (len(expected) > 1)
    seen.clear()
    one, other = (measure_translation(x, x * factor, "net") for factor in (1, 0.5))
    assert seen == [12, 12, 12] and one["fd_floor"] == other["fd_floor"] > 0
    assert one["fd"] == pytest.approx(one["fd_floor"]) and other["fd"] > 0


def test_samples_of_a_diverged_run_are_refused_with_the_mend() -> None:
    held_out, samples = real_samples("ring8", seed=1)
    samples[0, 0] = math.inf
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_quality("ring8", held_out, samples)
    targets = torch.zeros(1, 3, 8, 8)
    assert measure_translation(targets, targets + 0.25)["l1"] == 0.25
    with pytest.raises(FedwanError, match="diverged; lower the learning rates"):
        measure_translation(targets, targets + math.nan)


@pytest.mark.parametrize("num", [1, 2, 3, 11, 12])
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
