"""A shaped link's arithmetic, on a clock that only the link moves."""

from __future__ import annotations

import math
from queue import SimpleQueue

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


class InstantLink:
    """Takes `takes_s` of the clock for everything, and counts what it is asked."""

    def __init__(self, clock: Clock, takes_s: float = 0.0) -> None:
        self.clock = clock
        self.takes_s = takes_s
        self.calls: list[str] = []
        self.signals: SimpleQueue[wire.CoordinatorSignal] = SimpleQueue()
        self.bytes_up = 11
        self.bytes_down = 22
        self.payload: Buffer | None = Buffer(1_000_000)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.clock.now += self.takes_s

    def join(self, hello: wire.Hello) -> wire.Welcome:
        self._call("join")
        return wire.Welcome()

    def heartbeat(self, step: int) -> None:
        self._call("heartbeat")

    def upload(self, header: wire.UploadHeader, payload: Buffer) -> wire.Receipt:
        self._call("upload")
        return wire.Receipt(status=wire.Receipt.ACCEPTED)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        self._call("download")
        return Delivery(wire.DownloadHeader(), self.payload)

    def report(self, report: wire.QualityReport) -> None:
        self._call("report")

    def leave(self, farewell: wire.Farewell) -> None:
        self._call("leave")

    def close(self) -> None:
        self._call("close")


def shaped(clock: Clock, inner: InstantLink, rate_mbit: float, rtt_ms: float) -> ShapedLink:
    return ShapedLink(inner, rate_mbit, rtt_ms, 0.0, clock.sleep, clock)


def test_an_upload_takes_a_round_trip_and_its_bytes() -> None:
    clock = Clock()
    link = shaped(clock, InstantLink(clock), rate_mbit=8.0, rtt_ms=100.0)
    link.upload(wire.UploadHeader(), Buffer(500_000))
    assert clock.slept == [pytest.approx(0.1 + 0.5)]


def test_what_an_upload_really_took_is_part_of_what_it_takes() -> None:
    clock = Clock()
    link = shaped(clock, InstantLink(clock, takes_s=0.4), rate_mbit=8.0, rtt_ms=100.0)
    link.upload(wire.UploadHeader(), Buffer(500_000))
    assert clock.slept == [pytest.approx(0.2)]
    link = shaped(clock, InstantLink(clock, takes_s=4.0), rate_mbit=8.0, rtt_ms=100.0)
    link.upload(wire.UploadHeader(), Buffer(500_000))
    assert len(clock.slept) == 1


def test_waiting_for_an_update_that_is_not_there_yet_is_no_part_of_its_transfer() -> None:
    clock = Clock()
    link = shaped(clock, InstantLink(clock, takes_s=5.0), rate_mbit=8.0, rtt_ms=100.0)
    link.download(wire.DownloadRequest())
    assert clock.slept == [pytest.approx(0.1 + 1.0)]


def test_loss_lowers_the_rate_as_mathis_says() -> None:
    # 1448 bytes, 100 ms, loss 1 %: 1448 * 8 / 0.1 * sqrt(1.5 / 0.01) bit/s.
    assert goodput_mbit(0.0, 100.0, 0.01) == pytest.approx(1.4187, rel=1e-4)
    assert goodput_mbit(1000.0, 100.0, 0.01) < goodput_mbit(1000.0, 100.0, 0.001)
    assert goodput_mbit(1000.0, 100.0, 0.01) < goodput_mbit(1000.0, 10.0, 0.01)
    assert goodput_mbit(1.0, 100.0, 0.01) == 1.0
    assert goodput_mbit(0.0, 0.0, 0.5) == math.inf
    assert flow_mbit("cubic", 100.0, 1e-4) > flow_mbit("reno", 100.0, 1e-4)
    assert flow_mbit("cubic", 100.0, 0.0) == math.inf
