"""Tables: their declarations, and what becomes of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import planner, quality
from benchmarks.codecs import delta_like, measure_codec, pix2pix_layout
from benchmarks.harness.table import read_arguments
from benchmarks.quality import Case, Outcome, Runs
from fedwan.codecs import int4

RING = Case("gan", "ring8", "by_label", "scaffnew", 20, 4, quality.INT4)


def test_a_row_has_local_steps_beside_synchronous_training_of_the_same_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "runs.jsonl"
    asked: list[str] = []

    def train(words: list[str]) -> Outcome:
        asked.append(" ".join(words))
        is_sync = "strategy=sync" in words
        figures = {"fd": 2.0 + ("seed=1" in words) + (not is_sync), "fd_floor": 0.7, "good": 0.5}
        return figures | {"num_real": 40, "modes": 7, "bytes_per_step": 100.0 * is_sync}

    monkeypatch.setattr(quality, "train", train)
    row = quality.compare(RING, Runs(tmp_path, kept), range(2), share=0.05)
    keys = "workload data split strategy h sites seeds fd_mean fd_sd".split()
    assert list(row)[: len(keys)] == keys
    assert (row["fd_mean"], row["sync_fd_mean"], row["ratio"]) == (3.5, 2.5, 1.4)
    assert row["ratio_half_interval"] == pytest.approx(12.71 * 0.2 / 2.5, rel=1e-3)
    assert (row["modes"], row["with_all_modes"]) == (7, "0 of 2")
    assert (row["num_real"], row["seen_through"]) == (40, None)
    assert row["l1_ratio"] is row["teacher_ratio"] is None
    # What was run is not run again, by another process neither.
    assert quality.compare(RING, Runs(tmp_path, kept), range(2), share=0.05) == row
    assert len(asked) == len(kept.read_text().splitlines()) == 4


def test_a_codecs_row_has_the_columns_and_its_own_figures() -> None:
    layout = pix2pix_layout(4)
    row = measure_codec(int4(), layout, delta_like(layout, torch.device("cpu")), seconds=0.01)
    columns = "codec device bits_per_value encode_mb_s decode_mb_s rel_error"
    assert list(row) == columns.split()
    assert row["codec"] == "int4" and row["device"] == "cpu"
    assert 4.125 < row["bits_per_value"] < 4.5
    assert 0.1 < row["rel_error"] < 0.3


def test_a_prediction_is_of_pix2pix_s_tensors() -> None:
    layout = pix2pix_layout(64)
    assert sum(spec.num_values for spec in layout.values()) == 57_182_660
    case = planner.cases(read_arguments(planner, "planner", ["--quick"]))[2]
    assert 0 < planner.predict(case, layout) < 1
