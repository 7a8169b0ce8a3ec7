"""Ends that answer pings and nothing else: calls to them are ended, and made again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedwan.codecs import Payload
from fedwan.errors import LinkLost
from fedwan.link import rpc
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from tests.planes import (
    Bench,
    eventually,
    header_of,
    in_thread,
    joined,
    joined_through_proxy,
    random_payload,
    read_all,
    serving,
    stub_of,
    update_request,
)

Call = Callable[[GrpcLink, Bench, Payload], Any]


def join(link: GrpcLink, bench: Bench, payload: Payload) -> Any:
    return link.join(bench.hello("s1"))


def upload(link: GrpcLink, bench: Bench, payload: Payload) -> Any:
    return link.upload(header_of(payload), payload)


def download(link: GrpcLink, bench: Bench, payload: Payload) -> Any:
    return link.download(update_request())


HUNG = [("join", join), ("open_upload", upload), ("close_stripe", upload), ("download", download)]


class Hanging:
    """A method of the hub that does not return, while `hangs`; gRPC's own threads go on."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner
        self._release = threading.Event()
        self.hangs = True
        self.num_calls = 0

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        if self.hangs:
            self._release.wait()
        return self._inner(*args)

    def release(self) -> None:
        self.hangs = False
        self._release.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Bench, str], Hanging]]:
    hanging: list[Hanging] = []

    def hang(bench: Bench, method: str) -> Hanging:
        hanging.append(Hanging(getattr(bench.hub, method)))
        monkeypatch.setattr(bench.hub, method, hanging[-1])
        return hanging[-1]

    yield hang
    for each in hanging:
        each.release()


def look_until(condition: Callable[[], object]) -> None:
    """As the watch does every ten seconds, only more often."""
    eventually(lambda: (rpc.look(), condition())[1])


@pytest.mark.parametrize(("method", "call"), HUNG)
def test_a_call_that_a_coordinator_hangs_in_is_made_again(
    tmp_path: Path, identities: Path, hang: Any, method: str, call: Call
) -> None:
    bench = Bench(tmp_path, num_values=1_000_000)
    payload = random_payload(1, bench.layout)
    if call is download:
        bench.publish(1, payload)
    with joined(bench, identities, chunk_bytes=1 << 18) as link:
        hung = hang(bench, method)
        result = in_thread(lambda: call(link, bench, payload))
        eventually(lambda: hung.num_calls)
        hung.hangs = False  # the calls that hang already go on hanging
        look_until(lambda: not result.is_running())
        answer = result(1.0)
    if call is upload:
        assert answer.status == wire.Receipt.ACCEPTED
    if call is download:
        assert read_all(answer.payload) == read_all(payload)
    bench.forget()


def test_a_coordinator_that_goes_on_hanging_is_given_up_when_patience_ends(
    tmp_path: Path, identities: Path, hang: Any
) -> None:
    bench = Bench(tmp_path)
    payload = random_payload(1, bench.layout)
    with joined(bench, identities, patience_s=0.5) as link:
        hang(bench, "open_upload")
        result = in_thread(lambda: upload(link, bench, payload))
        look_until(lambda: not result.is_running())
        with pytest.raises(LinkLost, match=r"0.5 s \(connected, but it neither takes nor sends"):
            result(1.0)


def test_a_site_that_stops_reading_does_not_hold_the_coordinator_s_sender(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, num_values=6_000_000)
    bench.publish(1, random_payload(1, bench.layout))
    with serving(bench.hub, identities) as plane, stub_of(plane.port, identities / "s1") as stub:
        stub.Join(bench.hello("s1"))
        call = stub.Download(update_request())
        assert next(call).header is not None  # and no more
        eventually(lambda: rpc._watched)
        look_until(lambda: not rpc._watched)


def test_what_waits_for_its_own_end_is_left_alone(tmp_path: Path, identities: Path) -> None:
    """Here for a payload that is still being encoded."""
    bench = Bench(tmp_path)
    payload = random_payload(1, bench.layout)
    may, read = threading.Event(), payload.read

    class Slow:
        num_bytes = payload.num_bytes

        def read(self, offset: int, size: int) -> Any:
            may.wait()
            return read(offset, size)

    with joined(bench, identities) as link:
        result = in_thread(lambda: link.upload(header_of(payload), Slow()))
        eventually(lambda: any(watched.is_ours for watched in rpc._watched))
        (watched,) = (watched for watched in rpc._watched if watched.is_ours)
        for _ in range(10):
            rpc.look()
        assert watched in rpc._watched
        may.set()
        assert result(5.0).status == wire.Receipt.ACCEPTED


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_slow_link_is_no_standstill(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    bench = Bench(tmp_path, num_values=250_000, chunk_bytes=1 << 20)
    payload = random_payload(1, bench.layout)
    monkeypatch.setattr(rpc, "STALL_S", 0.2)  # a chunk takes ten times as long

    def failed(self: rpc.Patience, error: Exception) -> None:
        raise AssertionError(error)

    monkeypatch.setattr(rpc.Patience, "failed", failed)
    with joined_through_proxy(bench, identities, channels=1, chunk_bytes=1 << 20) as (link, proxy):
        proxy.slow_down(1, 5e5)
        if way == "down":
            bench.publish(1, payload)
        result = in_thread(lambda: (upload if way == "up" else download)(link, bench, payload))
        while result.is_running():
            time.sleep(0.2)
            rpc.look()
        result()
