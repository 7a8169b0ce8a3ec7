"""Faults planted in real, short runs, and what the coordinator's doctor tells of them."""

from __future__ import annotations

import pytest
from benchmarks.faults import FAULTS

from benchmarks import doctor


def test_every_fault_is_planted_where_it_applies() -> None:
    assert [fault.name for fault in FAULTS] == [
        *("noise", "range", "tiny_shard", "copies", "lr_x10"),
        *("memorising", "diverging", "stale", "collapse"),
    ]
    assert len(doctor.CASES) == 9 + 6 + 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_shard", "copies", "lr_x10", "stale", "none"])
def test_a_planted_fault_is_named_and_nothing_else(name: str) -> None:
    (case,) = [
        c for c in doctor.CASES if (c.fault.name, c.workload, c.split) == (name, "flow", "iid")
    ]
    row = doctor.run_case(case, seed=2, rounds=6, h=16)
    keys = "fault workload split seed site network named within_rounds false_alarms"
    assert list(row) == keys.split()
    assert row["false_alarms"] == "none"
    if name != "none":
        assert row["named"] and row["site"] == "s4" and row["within_rounds"] <= 6
