"""The promise's table: its declarations, and what becomes of outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import quality
from benchmarks.quality import Case, Outcome, Runs
from fedwan.app import load_run

RING = Case("gan", "ring8", "by_label", "scaffnew", 20, 4, quality.INT4)


def test_a_row_has_local_steps_beside_synchronous_training_of_the_same_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "runs.jsonl"
    asked: list[str] = []

    def train(words: list[str]) -> Outcome:
        asked.append(" ".join(words))
        fd = 2.0 + ("seed=1" in words) + ("strategy=sync" not in words)
        return Outcome(fd, 0.7, 7, 100.0 * ("strategy=sync" in words), good=0.5)

    monkeypatch.setattr(quality, "train", train)
    row = quality.measure_case(RING, Runs(tmp_path, kept), seeds=2, share=0.05)
    keys = "workload data split strategy h sites seeds fd_mean fd_sd fd_floor".split()
    assert list(row)[: len(keys)] == keys
    assert (row["fd_mean"], row["sync_fd_mean"], row["ratio"]) == (3.5, 2.5, 1.4)
    assert row["l1_ratio"] is row["teacher_ratio"] is None
    # What was run is not run again, by another process neither.
    assert quality.measure_case(RING, Runs(tmp_path, kept), seeds=2, share=0.05) == row
    assert len(asked) == len(kept.read_text().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("is_sync", [False, True])
def test_every_case_can_be_run(is_sync: bool) -> None:
    for words in {tuple(case.words(is_sync)) for case in quality.CASES}:
        if not any(quality.TEACHER in word for word in words):
            load_run(None, words)
