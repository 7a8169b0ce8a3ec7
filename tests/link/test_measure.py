"""Advice is a pure function of a measurement; a table of links, good and bad."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedwan.link.measure import Measurement, Way, advise
from fedwan.link.tcp import TcpSettings

MB = 1 << 20
READY = TcpSettings(
    allowed=("reno", "cubic", "bbr"),
    available=("reno", "cubic", "bbr"),
    receive=(4096, 131072, 64 * MB),
    send=(4096, 16384, 64 * MB),
)
FORBIDDEN = replace(READY, allowed=("reno", "cubic"))
MISSING = replace(READY, allowed=("reno",), available=("reno",))
LOSSY = Measurement(
    address="coordinator:7444",
    site="s1",
    channels=4,
    rtt_ms=100.0,
    loaded_ms=101.0,
    up=Way(80.0, "cubic", 1e-4),
    down=Way(80.0, "bbr", None),
    machine=READY,
)


@pytest.mark.parametrize(
    ("machine", "command"),
    [
        (READY, "link.congestion=auto"),
        (FORBIDDEN, "tcp_allowed_congestion_control='reno cubic bbr'"),
        (MISSING, "sudo modprobe tcp_bbr"),
    ],
)
def test_loss_that_holds_uploads_back_asks_for_bbr_in_the_way_this_machine_needs(
    machine: TcpSettings, command: str
) -> None:
    advice = advise(replace(LOSSY, machine=machine))
    assert advice is not None and command in advice.command
    assert (advice.machine, advice.way, advice.gain) == ("site", "up", 1.0)
    known = advise(replace(LOSSY, machine=machine), rate_mbit=400.0)
    assert known is not None and known.gain == 5.0


@pytest.mark.parametrize(
    "found",
    [
        replace(LOSSY, up=Way(80.0, "cubic", 0.0)),
        replace(LOSSY, up=Way(80.0, "cubic", None)),
        replace(LOSSY, up=Way(80.0, "bbr", 1e-3)),
        replace(LOSSY, up=Way(80.0, "", 1e-3)),
        replace(LOSSY, up=Way(900.0, "cubic", 1e-4), down=Way(900.0, "bbr", None)),
        replace(LOSSY, loaded_ms=300.0),
        replace(LOSSY, machine=TcpSettings((), (), (), ())),
    ],
    ids=["no loss", "unknown", "bbr", "no name", "far above theory", "queued", "no kernel"],
)
def test_there_is_no_advice_where_there_is_no_cause(found: Measurement) -> None:
    assert advise(found) is None


def test_a_coordinator_without_bbr_that_sends_slowly_is_told_so() -> None:
    slow = replace(LOSSY, up=Way(90.0, "bbr", 1e-3), down=Way(30.0, "cubic", None))
    advice = advise(slow)
    assert advice is not None
    assert (advice.machine, advice.way, advice.gain) == ("coordinator", "down", 3.0)
    assert advise(replace(slow, down=Way(80.0, "cubic", None))) is None


@pytest.mark.parametrize(("way", "key"), [("up", "tcp_wmem"), ("down", "tcp_rmem")])
def test_buffers_that_are_filled_are_to_grow_with_the_rate(way: str, key: str) -> None:
    small = replace(READY, receive=(4096, 131072, MB), send=(4096, 16384, MB))
    limit = 4 * MB / 2 * 8 / 1e6 / 0.1
    full = Way(0.9 * limit, "bbr", None)
    found = replace(LOSSY, up=Way(50.0, "bbr", 0.0), down=Way(50.0, "bbr", None), machine=small)
    found = replace(found, **{way: full})
    advice = advise(found)
    assert advice is not None and (advice.machine, advice.way) == ("site", way)
    assert key in advice.command and advice.command.endswith(f" {4 * MB}'")
    known = advise(found, rate_mbit=2 * limit)
    assert known is not None and known.command.endswith(f" {2 * MB}'")
    assert advise(replace(found, **{way: replace(full, mbit=0.3 * limit)})) is None
