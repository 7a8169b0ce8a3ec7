"""Advice is a pure function of a measurement; a table of links, good and bad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedwan.link.advice import advise, flow_mbit
from fedwan.link.measure import Machine, Measurement, Way

READY = Machine(
    ("reno", "cubic", "bbr"),
    ("reno", "cubic", "bbr"),
    (4096, 131072, 64 << 20),
    (4096, 16384, 64 << 20),
)
RESTRICTED = replace(READY, allowed=("reno", "cubic"))
UNLOADED = replace(RESTRICTED, available=("reno", "cubic"))
SILENT = Machine((), (), (), ())
SHORT = replace(READY, receive=(4096, 131072, 4 << 20), send=(4096, 16384, 4 << 20))

GOOD = Way(
    one_mbit=190.0,
    all_mbit=195.0,
    best_mbit=197.0,
    again=0.0,
    loss=0.0,
    congestion="bbr",
    window=0.0,
    buffer=0.0,
    rtt_ms=101.0,
)
LOSSY = replace(
    GOOD,
    one_mbit=6.0,
    all_mbit=46.0,
    best_mbit=138.0,
    again=0.0012,
    loss=0.001,
    congestion="cubic",
)
"""At 100 ms theory gives a cubic flow at a loss of 0.1 % 4.5 Mbit/s, and 8 of them 36."""
FULL = replace(LOSSY, one_mbit=44.0, all_mbit=46.0, best_mbit=47.0, rtt_ms=180.0)
WAITING = replace(GOOD, one_mbit=160.0, all_mbit=1200.0, best_mbit=1250.0, window=0.8)


def link(**changes: Any) -> Measurement:
    base = Measurement("c:7444", "s1", 8, 100.0, GOOD, GOOD, READY, READY)
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("found", "rate_mbit", "machine", "way", "command", "gain"),
    [
        (link(up=LOSSY, here=UNLOADED), 0, "site", "up", "sudo modprobe tcp_bbr", 3.0),
        (
            link(up=LOSSY, here=RESTRICTED),
            0,
            "site",
            "up",
            "sudo sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'",
            3.0,
        ),
        # A download's sender is the coordinator.
        (
            link(down=LOSSY, there=UNLOADED),
            0,
            "coordinator",
            "down",
            "sudo modprobe tcp_bbr",
            3.0,
        ),
        (link(down=LOSSY), 0, "coordinator", "down", "link.congestion=auto", 3.0),
        # What the user knows of the path counts more than what was seen.
        (link(up=LOSSY, here=UNLOADED), 460, "site", "up", "sudo modprobe tcp_bbr", 10.0),
        # Theory and more channels both say that loss holds each, though no burst was seen.
        (
            link(up=replace(LOSSY, best_mbit=50.0), here=UNLOADED),
            0,
            "site",
            "up",
            "sudo modprobe tcp_bbr",
            50 / 46,
        ),
        # Full in the eyes of the probe, but not of the contract.
        (link(up=FULL, here=UNLOADED), 184, "site", "up", "sudo modprobe tcp_bbr", 4.0),
        # An upload waits for the coordinator's window, and the site's own buffer.
        (
            link(up=WAITING, there=SHORT),
            0,
            "coordinator",
            "up",
            "sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216'",
            4.0,
        ),
        (
            link(up=replace(WAITING, window=0.0, buffer=0.5), here=SHORT),
            0,
            "site",
            "up",
            "sudo sysctl -w net.ipv4.tcp_wmem='4096 16384 16777216'",
            4.0,
        ),
        (
            link(down=WAITING, here=SHORT),
            1800,
            "site",
            "down",
            "sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 8388608'",
            1.5,
        ),
        # The larger gain wins.
        (
            link(up=LOSSY, down=WAITING, here=replace(SHORT, allowed=("reno", "cubic"))),
            0,
            "site",
            "down",
            "sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216'",
            4.0,
        ),
    ],
)
def test_the_command_that_helps_most_with_its_gain(
    found: Measurement, rate_mbit: float, machine: str, way: str, command: str, gain: float
) -> None:
    advice = advise(found, rate_mbit)
    assert advice is not None
    assert (advice.machine, advice.way, advice.command) == (machine, way, command)
    assert advice.gain == pytest.approx(gain)
    assert "\n" not in advice.text and "expect" in advice.text


@pytest.mark.parametrize(
    "found",
    [
        link(),
        # No loss, so no congestion control does better.
        link(up=replace(LOSSY, again=0.0, loss=0.0), here=UNLOADED),
        link(up=replace(LOSSY, again=None, loss=None), here=UNLOADED),
        # A full path loses packets as well; packets queue there, or more channels get no more.
        link(up=FULL, here=UNLOADED),
        link(up=replace(FULL, rtt_ms=102.0), here=UNLOADED),
        # bbr is lossy where it fills the path, and is there already.
        link(up=replace(LOSSY, congestion="bbr"), here=UNLOADED),
        # A kernel that tells nothing has no command that is known to work.
        link(up=LOSSY, here=SILENT),
        link(up=replace(LOSSY, congestion=""), here=UNLOADED),
        # Who waits for a slow reader, far below what the buffers carry, waits for no buffer.
        link(up=replace(WAITING, all_mbit=400.0), there=SHORT),
        link(up=replace(WAITING, window=0.1), there=SHORT),
        link(up=WAITING, there=SILENT),
        link(up=replace(WAITING, all_mbit=0.0), there=SHORT),
    ],
)
def test_nothing_to_mend(found: Measurement) -> None:
    assert advise(found) is None


def test_buffers_that_the_known_rate_does_not_need_stay() -> None:
    found = link(up=WAITING, there=SHORT)
    assert advise(found) is not None
    assert advise(found, rate_mbit=1210.0) is None


def test_the_reason_names_the_figures() -> None:
    advice = advise(link(up=LOSSY, here=UNLOADED))
    assert advice is not None
    for part in ("0.10% of the upload", "cubic", "46 Mbit/s on 8", "at least 3.0 times", "138"):
        assert part in advice.text
    assert "theory gives 35.9 Mbit/s" in advice.text


def test_a_flow_s_rate_is_that_of_its_theory() -> None:
    # MSS / RTT · √1.5 / √p, and 1.054 (RTT / p)^0.75 segments in a round trip.
    assert flow_mbit("reno", 100.0, 0.0001) == pytest.approx(14.19, rel=1e-3)
    assert flow_mbit("cubic", 100.0, 0.0001) == pytest.approx(21.71, rel=1e-3)
    # Where windows are small cubic behaves as reno does.
    assert flow_mbit("cubic", 10.0, 0.01) == flow_mbit("reno", 10.0, 0.01)
    assert flow_mbit("cubic", 100.0, 0.0) == float("inf")
