"""Tables: their declarations, and what becomes of runs."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import chaos, planner, quality, strategies, sync_vs_local
from benchmarks.codecs import delta_like, measure_codec, pix2pix_layout
from benchmarks.harness.table import measure_all, read_arguments
from benchmarks.peers.flower_secagg import measure_flower
from benchmarks.quality import Case, Outcome, Runs
from fedwan.codecs import int4
from fedwan.errors import FedwanError

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


def test_emoji_are_run_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "compare", lambda case, *_: {"data": case.data})
    for only, is_run in (("", False), ("experts", False), ("emoji", True)):
        words = ["--only", only]
        rows = measure_all(quality, read_arguments(quality, "quality", words))
        assert any(row["data"] == "emoji" for row in rows) is is_run


def test_what_coding_costs_has_an_interval_by_seed() -> None:
    figures = {"diloco, fp32": (1.0, 2.0), "diloco, int4": (1.1, 2.0)}
    rows = [{"strategy": n, "absent": False, "fd": v} for n, of in figures.items() for v in of]
    plain, coded = strategies.summarise(rows)
    assert "ratio" not in plain and "ratio to what is not coded 1.033 ± 0.565" in coded
    (alone,) = strategies.summarise([row for row in rows if "int4" in row["strategy"]])
    assert "ratio" not in alone


def test_synchronous_or_local_counts_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"version": v, "compute_s": 2.0, "wait_s": 2.0, "bytes_up": 10, "bytes_down": 10}
        for v in (1, 2)
    ]
    done = {"busy_s": 3.5, "bytes_up": 50, "bytes_down": 60}
    run: Any = SimpleNamespace(
        rounds=rows,
        records=[{"kind": "quality", "version": v, "fd": 3.0 - v} for v in (1, 2)],
        sites=[done] * sync_vs_local.SITES,
        summary={
            **{"steps": 40, "utilisation": 0.5, "global_sha256": "f"},
            "quality": {"fd": 1.0, "fd_floor": 0.7},
        },
    )
    monkeypatch.setattr(sync_vs_local, "run_fleet", lambda *_, **__: run)
    strategy = sync_vs_local.Strategy("diloco")
    row, curve = sync_vs_local.measure_one("gan", strategy, "loopback", 0, 40)
    assert (row["wall_s"], row["bytes_up"], row["bytes_down"]) == (3.5, 200, 240)
    assert curve == [(1.0, 2.0), (2.0, 1.0)]


def test_a_strategy_that_trains_otherwise_over_a_link_has_no_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(workload: str, strategy: Any, link: str, seed: int, steps: int) -> Any:
        return {"extrapolated": False, "fd": 1.0, "sha256": link}, [(1.0, 1.0)]

    monkeypatch.setattr(sync_vs_local, "measure_one", measure)
    with pytest.raises(FedwanError, match="sync trains otherwise over b"):
        list(sync_vs_local.compare("gan", 0, 40, ["a", "b"]))


def test_a_kind_of_fault_that_nothing_recovers_from_is_told() -> None:
    row = {"fault": "Ctrl-C", "seconds": 300.0, "problem": "at version 3 after 300 s"}
    _, _, line, total, _ = chaos.summarise([row])
    assert line == "| Ctrl-C | 1 | 0 | - | - | - |" and total == "| all | 1 | 0 | - | - | - |"


def test_a_reset_is_one_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, asked = ["", "ESTAB 0 0 a b"], list[str]()

    def inside(*words: str) -> str:
        asked.append(words[-1])
        return closed.pop(0) if closed else ""

    listening = [{"event": "listening", "text": "on 127.0.0.1:7444"}]
    run: Any = SimpleNamespace(journal=lambda: listening, inside=inside)
    chaos._resets(run, random.Random(0))
    assert asked == ["( sport = :7444 or dport = :7444 )"] * 2
    monkeypatch.setattr(chaos, "PATIENCE_S", 0.01)
    with pytest.raises(FedwanError, match="no connection"):
        chaos._resets(run, random.Random(0))


def test_a_masked_vector_of_flowers_is_of_the_integers_that_it_sends() -> None:
    num_bytes, _, _ = measure_flower([np.zeros((10, 100), np.float32)], 4)
    assert num_bytes == 8 * 1000
