"""The benchmark of the codecs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.codecs import CODECS, COLUMNS, TARGETS, delta_like, measure, pix2pix_layout
from fedwan.codecs import int4

ROOT = Path(__file__).parents[2]


def test_the_values_are_those_of_pix2pix() -> None:
    assert sum(spec.num_values for spec in pix2pix_layout(64).values()) == 57_182_660


def test_deltas_differ_in_size_between_tensors_and_have_heavy_tails() -> None:
    values = delta_like(pix2pix_layout(4), torch.device("cpu"))
    sizes = [float(v.std()) for v in values.values() if v.numel() > 1000]
    assert max(sizes) > 3 * min(sizes)
    large = max(values.values(), key=lambda v: v.numel())
    assert float(large.abs().max()) > 10 * float(large.std())
    again = delta_like(pix2pix_layout(4), torch.device("cpu"))
    assert all(torch.equal(values[name], again[name]) for name in values)


def test_a_row_has_the_columns_and_the_codecs_own_figures() -> None:
    layout = pix2pix_layout(4)
    row = measure(int4(), layout, delta_like(layout, torch.device("cpu")), passes=1)
    assert tuple(row) == COLUMNS
    assert row["codec"] == "int4" and row["device"] == "cpu"
    assert 4.125 < row["bits_per_value"] < 4.5
    assert 0.1 < row["rel_error"] < 0.3


@pytest.mark.slow
@pytest.mark.alone
def test_the_command_writes_rows_and_a_picture_and_meets_the_targets(tmp_path: Path) -> None:
    path = tmp_path / "codecs.json"
    command = [sys.executable, "benchmarks/codecs.py", "--quick", "--json", str(path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    rows = {row["codec"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert list(rows) == [codec().name for codec in CODECS]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for name in ("int8", "int4"):
        assert all(rows[name][column] >= target for column, target in TARGETS.items())
    assert rows["int4"]["bits_per_value"] <= 4.3
    assert rows["topk2"]["bits_per_value"] <= 32 / 140
