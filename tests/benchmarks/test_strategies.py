"""The strategies' table and that of unequal sites: rows of real, short runs."""

from __future__ import annotations

import pytest

from benchmarks import strategies, unequal
from fedwan.app import load_run, load_workload
from fedwan.codecs import fp32
from fedwan.state import layout_of

pytestmark = pytest.mark.slow


def test_bytes_are_those_of_a_site_and_a_step() -> None:
    row = strategies.measure("flow", "diloco", 0, 100, is_disturbed=False)
    config = load_run(None, ["workload=flow", "sites=4"])
    networks = load_workload("flow").build(config, "cpu").networks
    size = fp32().payload_bytes(layout_of(dict(networks)))
    # Five contributions of each site, and the initial weights of one of the four.
    assert row["bytes_up"] * row["h"] == pytest.approx(size * (1 + 1 / (5 * 4)), rel=0.01)
    assert row["fd_floor"] < row["fd"] < 60, "80 untrained"
    assert (row["late"], row["dropped"]) == (0, 0)


def test_a_site_s_absence_is_borne() -> None:
    row = strategies.measure("flow", "async_diloco", 0, 200, is_disturbed=True)
    assert row["absent"] and row["fd"] < 60
    # After a warm-up of 100 steps each site fetches the updates of all.
    assert row["bytes_down"] > 1.2 * row["bytes_up"]


def test_behind_a_barrier_a_run_lasts_as_long_as_its_slow_site_s_steps() -> None:
    row = unequal.measure("flow", "diloco", 0, 40)
    assert row["wall_s"] >= 40 * unequal.SLOW_FACTOR * unequal.STEP_S
    assert row["samples"] == 40 * unequal.SITES * 64
