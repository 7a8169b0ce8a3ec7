"""Costs in a plan's table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedwan.config import CodecConfig
from fedwan.planner.candidates import candidates
from fedwan.planner.predict import predict
from fedwan.planner.table import row_of, table_lines
from tests.planner.models import question


def test_cost_is_all_sites_bytes_at_the_price() -> None:
    settled = ("strategy", "h", "codec.up", "codec.down")
    asked = question(settled, strategy="diloco", h=50, codec=CodecConfig("int4", "int4"))
    asked = replace(asked, usd_per_gb=0.05)
    (candidate,) = candidates(asked)
    found = predict(candidate, asked, {})
    row = row_of(found, asked)
    # 4 sites, 10,000 steps, and the initial weights once.
    expected = (4 * 10_000 * found.bytes_per_step + 4 * 57.2e6) / 1e9 * 0.05
    assert row["usd"] == pytest.approx(expected, abs=0.01)
    head, line = table_lines([found], asked)
    assert head.endswith("cost") and line.endswith(f"${row['usd']:.2f}")
