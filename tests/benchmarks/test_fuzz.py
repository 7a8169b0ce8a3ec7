"""Damaged payloads: what the benchmark expects of each, and that it sees what is not so."""

from __future__ import annotations

import pytest

from benchmarks import fuzz
from benchmarks.harness.damage import SITES
from fedwan.codecs import codecs_by_name
from fedwan.coordinator.intake import Measures


@pytest.mark.parametrize("name", codecs_by_name(SITES))
def test_damaged_payloads_are_refused_or_merged_to_finite_values(name: str) -> None:
    tally = fuzz.fuzz_payloads(name, range(100))
    assert not tally.unexpected
    assert min(tally.found["refused"], tally.found["accepted"]) > 0
    assert tally.found["refused"] + tally.found["accepted"] == tally.found["cases"] == 100


def test_what_nobody_checks_is_found_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "inspect", lambda *_: Measures({}, {}))
    seed, text = fuzz.fuzz_payloads("fp32", range(100)).unexpected[0]
    assert "AssertionError: g/" in text
    assert fuzz.fuzz_payloads("fp32", range(seed, seed + 1)).unexpected[0][0] == seed
    # That a reader refuses what was accepted comes too late.
    assert any(
        "PayloadError" in text for _, text in fuzz.fuzz_payloads("int4", range(20)).unexpected
    )
