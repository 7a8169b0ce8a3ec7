"""A shaped link's arithmetic, on a clock that only the link moves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Buffer
from fedwan.link.loopback import ShapedLink
from fedwan.link.tcp import flow_mbit, goodput_mbit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now += duration_s


class InnerLink:
    """Takes `takes_s` of the clock for each transfer."""

    def __init__(self, clock: Clock, takes_s: float) -> None:
        self.clock, self.takes_s = clock, takes_s

    def upload(self, header: wire.UploadHeader, payload: Buffer) -> wire.Receipt:
        self.clock.now += self.takes_s
        return wire.Receipt(status=wire.Receipt.ACCEPTED)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        self.clock.now += self.takes_s
        return Delivery(wire.DownloadHeader(), Buffer(1_000_000))


@pytest.mark.parametrize(
    ("way", "takes_s", "waits"),
    [
        ("up", 0.0, [0.1 + 0.5]),
        ("up", 0.4, [0.2]),  # what it really took is part of what it takes
        ("up", 4.0, []),
        ("down", 5.0, [0.1 + 1.0]),  # waiting for an update is no part of its transfer
    ],
)
def test_a_transfer_takes_a_round_trip_and_its_bytes(
    way: str, takes_s: float, waits: list[float]
) -> None:
    clock = Clock()
    inner: Any = InnerLink(clock, takes_s)
    link = ShapedLink(inner, 8.0, 100.0, 0.0, clock.sleep, clock)
    if way == "up":
        link.upload(wire.UploadHeader(), Buffer(500_000))
    else:
        link.download(wire.DownloadRequest())
    assert clock.slept == pytest.approx(waits)


def test_loss_lowers_the_rate_as_mathis_says() -> None:
    # 1448 bytes, 100 ms, loss 1 %: 1448 * 8 / 0.1 * sqrt(1.5 / 0.01) bit/s.
    assert goodput_mbit(0.0, 100.0, 0.01) == pytest.approx(1.4187, rel=1e-4)
    assert goodput_mbit(1000.0, 100.0, 0.01) < goodput_mbit(1000.0, 100.0, 0.001)
    assert goodput_mbit(1000.0, 100.0, 0.01) < goodput_mbit(1000.0, 10.0, 0.01)
    assert goodput_mbit(1.0, 100.0, 0.01) == 1.0
    assert goodput_mbit(0.0, 0.0, 0.5) == math.inf
    assert flow_mbit("cubic", 100.0, 1e-4) > flow_mbit("reno", 100.0, 1e-4)
    assert flow_mbit("cubic", 100.0, 0.0) == math.inf
