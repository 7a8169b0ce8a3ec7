"""Ends that answer pings and nothing else: calls to them are ended, and made again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedwan.errors import LinkLost
from fedwan.link import client, rpc
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from tests.planes import (
    Bench,
    carry,
    eventually,
    in_thread,
    joined,
    joined_through_proxy,
    random_payload,
    serving,
    stub_of,
    update_request,
)


def call(link: GrpcLink, bench: Bench, what: str, coded_s: float = 0.0) -> Callable[[], Any]:
    """`coded_s`: when the payload is there, on the monotonic clock."""
    payload = random_payload(1, bench.layout)
    read = payload.read

    def read_once_coded(*place: int) -> Any:
        time.sleep(max(0.0, coded_s - time.monotonic()))
        return read(*place)

    payload.read = read_once_coded  # type: ignore[method-assign, assignment]
    if what == "join":
        return lambda: link.join(bench.hello("s1"))
    return lambda: carry(bench, link, what, payload)


Hang = Callable[[Bench, str, int], None]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """The next calls of a method of the hub do not return; gRPC's own threads go on."""
    release = threading.Event()

    def hang(bench: Bench, method: str, num_calls: int) -> None:
        inner, left = getattr(bench.hub, method), [None] * num_calls

        def hanging(*args: Any) -> Any:
            if left:
                left.pop()
                release.wait()
            return inner(*args)

        monkeypatch.setattr(bench.hub, method, hanging)

    yield hang
    release.set()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[grpc.StatusCode, float]]:
    """Calls that have failed: why, and when."""
    found, failed = [], rpc.Patience.failed

    def note(self: rpc.Patience, error: grpc.RpcError) -> None:
        found.append((error.code(), time.monotonic()))
        failed(self, error)

    monkeypatch.setattr(rpc.Patience, "failed", note)
    return found


def look_until(condition: Callable[[], object]) -> None:
    """As the watch does every ten seconds, only more often."""
    eventually(lambda: (rpc.look(), condition())[1])


@pytest.mark.parametrize(
    ("method", "num_calls", "what"),
    [
        ("join", 1, "join"),
        ("open_upload", 2, "up"),
        ("close_stripe", 2, "up"),
        ("download", 1, "down"),
        ("open_upload", 9, "up"),  # until patience ends
    ],
)
def test_a_call_that_a_coordinator_hangs_in_is_made_again(
    tmp_path: Path, identities: Path, hang: Hang, method: str, num_calls: int, what: str
) -> None:
    bench = Bench(tmp_path, num_values=1_000_000)
    with joined(bench, identities, patience_s=30.0 if num_calls < 9 else 0.3) as link:
        hang(bench, method, num_calls)
        result = in_thread(call(link, bench, what))
        look_until(lambda: not result.is_running())
        if num_calls == 9:
            with pytest.raises(LinkLost, match="0.3 s .connected, but it neither takes nor sends"):
                result()
            return
        assert result()


def test_a_site_that_stops_reading_does_not_hold_the_coordinator_s_sender(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, num_values=6_000_000)
    bench.publish(1, random_payload(1, bench.layout))
    with serving(bench.hub, identities) as plane, stub_of(plane.port, identities / "s1") as stub:
        stub.Join(bench.hello("s1"))
        parts = stub.Download(update_request())
        assert next(parts).header is not None  # and no more
        eventually(lambda: rpc._watched)
        look_until(lambda: not rpc._watched)


def test_a_path_that_swallows_everything_and_breaks_nothing_is_noticed(
    tmp_path: Path, identities: Path, failures: list[tuple[grpc.StatusCode, float]]
) -> None:
    bench = Bench(tmp_path)
    with joined_through_proxy(bench, identities) as (link, proxy):
        call(link, bench, "down")()  # the connections stand
        proxy.black_hole()
        result = in_thread(call(link, bench, "down"))
        look_until(lambda: failures)
        proxy.come_back()
        assert result() and {code for code, _ in failures} == {grpc.StatusCode.CANCELLED}


@pytest.mark.slow
def test_a_word_said_while_the_stream_is_broken_arrives_once_it_is_back(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path)
    with joined_through_proxy(bench, identities) as (link, proxy):
        eventually(lambda: bench.registry.sites["s1"].step == 0)
        proxy.black_hole()
        time.sleep(0.3)
        bench.hub.finish("enough")  # goes into a stream that nobody reads
        time.sleep(0.5)
        proxy.leave()
        proxy.come_back()
        signal = link.signals.get(timeout=10)
        assert (signal.kind, signal.text) == (wire.CoordinatorSignal.STOP, "enough")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["up", "down"])
def test_a_slow_link_is_no_standstill_and_a_slow_encoder_costs_a_question(
    tmp_path: Path,
    identities: Path,
    failures: list[tuple[grpc.StatusCode, float]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    bench = Bench(tmp_path, num_values=125_000, chunk_bytes=1 << 20)
    monkeypatch.setattr(rpc, "STALL_S", 0.2)  # a chunk takes five times as long
    monkeypatch.setattr(client, "CHUNK_BYTES", 1 << 20)
    with joined_through_proxy(bench, identities, channels=1) as (link, proxy):
        proxy.slow_down(1, 5e5)
        coded_s = time.monotonic() + 2.0 * (what == "up")
        result = in_thread(call(link, bench, what, coded_s))
        while result.is_running():
            time.sleep(0.2)
            rpc.look()
        result()
        assert all(when < coded_s + 0.5 for _, when in failures)
