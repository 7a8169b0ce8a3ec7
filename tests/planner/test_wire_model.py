"""How long bytes take."""

from __future__ import annotations

import math

import pytest

from fedwan.config import LinkConfig
from fedwan.link.advice import flow_mbit
from fedwan.planner.wire_model import Pipe, modelled_link


def mbit(**settings: object) -> float:
    return modelled_link(LinkConfig(**settings)).up.bytes_per_s * 8 / 1e6  # type: ignore[arg-type]


def test_payloads_never_get_the_whole_rate() -> None:
    # Headers alone leave 96.5 %.
    assert 80 < mbit(rate_mbit=100.0, rtt_ms=100.0) < 96.5


def test_a_pace_below_the_rate_saves_what_bbr_loses_at_the_queue() -> None:
    plain = mbit(rate_mbit=100.0, rtt_ms=100.0, congestion="bbr")
    paced = mbit(rate_mbit=100.0, rtt_ms=100.0, congestion="bbr", pace_mbit=99.0)
    assert plain < paced < 96.5
    # A pace above the rate changes nothing.
    assert mbit(rate_mbit=100.0, rtt_ms=100.0, congestion="bbr", pace_mbit=200.0) == plain


def test_losses_hold_cubic_back_and_bbr_hardly() -> None:
    lossy = {"rate_mbit": 200.0, "rtt_ms": 150.0, "loss": 0.001}
    assert mbit(**lossy, congestion="cubic") == 4 * flow_mbit("cubic", 150.0, 0.001)
    assert mbit(**lossy, congestion="bbr") > 160


def test_a_link_without_limits_takes_no_time() -> None:
    pipe = modelled_link(LinkConfig()).up
    assert pipe.transfer_s(1e12, math.inf) == 0.0


def test_a_new_connection_doubles_its_window_in_each_round_trip() -> None:
    pipe = Pipe(12.5e6, 0.1)
    # 10 segments, then 20: two round trips before the third window is under way.
    assert pipe.transfer_s(3 * 14480 + 100, math.inf) == pytest.approx(0.2 + 100 / 12.5e6)
    full_s = 100e6 / 12.5e6
    assert full_s + 0.3 < pipe.transfer_s(100e6, math.inf) < full_s + 0.8


def test_a_pause_costs_cubic_its_window_and_bbr_nothing() -> None:
    bbr, cubic = Pipe(12.5e6, 0.1), Pipe(12.5e6, 0.1, restarts=True)
    assert bbr.transfer_s(1e6, idle_s=5.0) == cubic.transfer_s(1e6, idle_s=0.0) == 0.08
    assert cubic.transfer_s(1e6, idle_s=0.1) == 0.08  # shorter than a timeout
    assert cubic.transfer_s(1e6, idle_s=0.7) < cubic.transfer_s(1e6, idle_s=5.0)
    assert cubic.transfer_s(1e6, idle_s=5.0) <= cubic.transfer_s(1e6, idle_s=math.inf)
