"""The promise's table: rows of real, short runs."""

from __future__ import annotations

import pytest

from benchmarks import quality

pytestmark = pytest.mark.slow


def test_a_row_has_local_steps_beside_synchronous_training_of_the_same_seeds() -> None:
    (case,) = [c for c in quality.CASES if c.data == "ring8" and c.model]
    row = quality.measure(case, seeds=2, share=0.05)
    keys = "workload data split strategy h sites seeds fd_mean fd_sd fd_floor".split()
    assert list(row)[: len(keys)] == keys
    assert row["seeds"] == 2 and row["fd_sd"] > 0 and 0 <= row["modes"] <= 8
    assert row["ratio"] == pytest.approx(row["fd_mean"] / row["sync_fd_mean"], rel=1e-2)
    # Four bits instead of 32, every 20 steps instead of every one.
    assert row["sync_bytes_per_step"] > 100 * row["bytes_per_step"]
    assert quality.train.cache_info().misses == 4


def test_synchronous_training_is_the_same_for_every_split() -> None:
    twins = {tuple(case.words(True)) for case in quality.CASES}
    kinds = {(c.workload, c.data, c.sites, c.model) for c in quality.CASES}
    assert len(twins) == len(kinds)
