"""The promise's table: rows of real, short runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import Case, Runs
from fedwan.app import load_run, load_workload
from fedwan.data.shard import open_shard
from fedwan.rng import derive_seed
from fedwan.site.replica import Replica
from fedwan.state import clone

pytestmark = pytest.mark.slow


RING = Case("gan", "ring8", "by_label", "scaffnew", 20, 4, quality.INT4)


def test_a_row_has_local_steps_beside_synchronous_training_of_the_same_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "runs.jsonl"
    row = quality.measure(RING, Runs(tmp_path, kept), seeds=2, share=0.05)
    keys = "workload data split strategy h sites seeds fd_mean fd_sd fd_floor".split()
    assert list(row)[: len(keys)] == keys
    assert row["seeds"] == 2 and row["fd_sd"] > 0 and 0 <= row["modes"] <= 8
    assert 0 <= row["good"] <= 1 and 0 <= row["sync_good"] <= 1
    assert row["ratio"] == pytest.approx(row["fd_mean"] / row["sync_fd_mean"], rel=1e-2)
    # Four bits instead of 32, every 20 steps instead of every one.
    assert row["sync_bytes_per_step"] > 100 * row["bytes_per_step"]
    assert row["l1_ratio"] is row["teacher_ratio"] is None
    # What was run is not run again, by another process neither.
    monkeypatch.setattr(quality, "train", lambda words: pytest.fail(f"trains again: {words}"))
    assert quality.measure(RING, Runs(tmp_path, kept), seeds=2, share=0.05) == row
    assert len(kept.read_text().splitlines()) == 4
    assert {json.loads(line)["modes"] for line in kept.read_text().splitlines()} <= set(range(9))


def test_a_distance_is_the_mean_over_sets_of_samples_of_the_weights_in_question() -> None:
    config = load_run(None, [*RING.words(False), "seed=3"])
    workload = load_workload("gan").build(config, "cpu")
    weights = clone(Replica(workload, config.inner).base)
    held_out = open_shard(config.data, 0, config.sites, config.seed).held_out
    seeds = [derive_seed(3, "evaluate", index) for index in range(quality.NUM_EVALUATIONS)]
    with torch.no_grad():
        alone = [workload.evaluate(held_out, seed)["fd"] for seed in seeds]
    assert len(set(alone)) == len(alone) > 1
    assert quality.evaluate(config, weights)["fd"] == pytest.approx(sum(alone) / len(alone))
    stirred = {name: 1.5 * value for name, value in weights.items()}
    assert quality.evaluate(config, stirred)["fd"] != quality.evaluate(config, weights)["fd"]
    del weights[min(weights)]
    with pytest.raises(AssertionError, match="whole model"):
        quality.evaluate(config, weights)


def test_a_student_stands_beside_a_teacher_of_its_seed(tmp_path: Path) -> None:
    student = Case("distill", "digits", "iid", "diloco", 20, 2, both=quality.STUDENT)
    row = quality.measure(student, Runs(tmp_path), seeds=1, share=0.01)
    assert row["teacher_ratio"] > 0 and row["sync_teacher_ratio"] > 0
    assert [folder.name for folder in tmp_path.iterdir()] == ["teacher-0-0.01"]


def test_synchronous_training_is_the_same_for_every_split() -> None:
    cases = quality.CASES
    twins = {tuple(case.words(True)) for case in cases}
    kinds = {(c.workload, c.data, c.sites, c.both) for c in cases}
    assert len(twins) == len(kinds)
    for case in cases:
        for is_sync in (False, True):
            words = [word for word in case.words(is_sync) if quality.TEACHER not in word]
            if len(words) == len(case.words(is_sync)):
                load_run(None, words)
