"""Seconds per value."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.planner.costs import Costs

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results.md"


def test_the_defaults_are_those_of_the_published_table() -> None:
    table = RESULTS.read_text().split("| codec | bits a value")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:8]]
    assert len(rows) == len(Costs().codecs)
    for name, _, encode_mb, add_mb, _ in rows:
        speed = Costs().speed(name)
        assert speed.encode_s == pytest.approx(4e-6 / float(encode_mb.replace(",", "")))
        assert speed.add_s == pytest.approx(4e-6 / float(add_mb.replace(",", "")))


def test_a_codec_that_nobody_timed_is_as_slow_as_the_slowest() -> None:
    assert Costs().speed("new") == Costs().speed("topk2")
