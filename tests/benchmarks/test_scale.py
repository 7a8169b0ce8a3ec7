"""The scale benchmark runs a real coordinator with many sites, and says what each round costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import scale

KEYS = [
    *"sites codec model_mb channels round_ms coordinator_cpu_s coordinator_rss_mb".split(),
    *"sites_cpu_s sites_rss_mb round_mb".split(),
]


@pytest.mark.slow
def test_a_row_per_number_of_sites_is_measured_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    words = ["--sites", "2", "--model-mb", "1", "--rounds", "4", "--channels", "1"]
    command = [sys.executable, scale.__file__, *words, "--json", str(path)]
    subprocess.run(command, check=True, timeout=120)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(row) == KEYS
    assert (row["sites"], row["codec"], row["model_mb"], row["channels"]) == (2, "int4", 1, 1)
    # 4 bits a value and a scale for each block, both ways, 2 sites.
    assert 2 * 2 / 8 < row["round_mb"] < 1.15 * 2 * 2 / 8
    assert row["round_ms"] > 0 and 0 < row["coordinator_cpu_s"] < 60
    assert row["coordinator_rss_mb"] > 50
    assert (tmp_path / "rows.png").stat().st_size > 10_000


def test_a_process_that_fails_ends_the_benchmark() -> None:
    waiting = subprocess.Popen(["sleep", "60"])
    failing = subprocess.Popen(["false"])
    with pytest.raises(SystemExit, match="failed"):
        scale._await_all([waiting, failing])
    assert waiting.returncode is not None


def test_rounds_that_leave_none_to_measure_are_refused() -> None:
    command = [sys.executable, scale.__file__, "--rounds", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and "--rounds=2 leaves none" in result.stderr
