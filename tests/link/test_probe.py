"""Probes of the link: bounded, one at a time for each site, beside transfers, over real TLS."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from fedwan.link import pki, probe
from fedwan.link import wire_pb2 as wire
from fedwan.link.methods import Stub
from fedwan.link.probe import Ticks, nothings
from fedwan.link.server import DataPlane
from tests.planes import (
    Bench,
    dialling,
    eventually,
    header_of,
    in_thread,
    random_payload,
    read_all,
    serving,
    stub_of,
)

Code = grpc.StatusCode


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, num_values=1_000_000)
    bench.set_model()
    return bench


@pytest.fixture
def plane(bench: Bench, identities: Path) -> Iterator[DataPlane]:
    with serving(bench.hub, identities) as plane:
        yield plane


@pytest.fixture
def stub(plane: DataPlane, identities: Path) -> Iterator[Stub]:
    with stub_of(plane.port, identities / "s1") as stub:
        yield stub


def request(seconds: float, probe: int = 1) -> wire.ProbeRequest:
    return wire.ProbeRequest(probe=probe, seconds=seconds)


def endless(seconds: float, probe: int = 1) -> Iterator[wire.ProbePart]:
    yield wire.ProbePart(request=request(seconds, probe))
    while True:
        yield wire.ProbePart(data=bytes(1 << 14))


def refused(code: grpc.StatusCode, call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value
    return str(caught.value.details())


def test_an_upload_is_counted_where_it_arrives(stub: Stub) -> None:
    parts = [wire.ProbePart(request=request(5.0), data=bytes(7))]
    parts += [wire.ProbePart(data=bytes(1000))] * 50
    reply = stub.ProbeUp(iter(parts), timeout=10)
    assert sum(reply.ticks) == 50_007


def test_the_coordinator_ends_an_upload_in_time_though_the_site_goes_on(stub: Stub) -> None:
    began = time.monotonic()
    reply = stub.ProbeUp(endless(0.35), timeout=10)
    assert 0.3 < time.monotonic() - began < 5.0
    assert len(reply.ticks) >= 4 and sum(reply.ticks) > 1 << 16


def test_a_download_lasts_as_long_as_asked_and_ends_with_the_far_end_s_figures(stub: Stub) -> None:
    began = time.monotonic()
    *parts, last = stub.ProbeDown(request(0.3), timeout=10)
    assert 0.25 < time.monotonic() - began < 5.0
    num_bytes = sum(len(part.data) for part in parts)
    assert num_bytes > 1 << 16 and last.HasField("reply")
    if sys.platform == "linux":
        tcp, settings = last.reply.tcp, last.reply.settings
        assert 0.5 * num_bytes < tcp.bytes_sent < 2 * num_bytes
        assert tcp.congestion and tcp.busy_us and tcp.rtt_us
        assert "reno" in settings.allowed and len(settings.receive) == len(settings.send) == 3


def test_a_site_has_one_probe_at_a_time_of_several_streams(
    stub: Stub, plane: DataPlane, identities: Path
) -> None:
    first = stub.ProbeDown(request(0.8, probe=1), timeout=10)
    next(first)
    text = refused(
        Code.FAILED_PRECONDITION, lambda: list(stub.ProbeDown(request(0.1, probe=2), timeout=10))
    )
    assert "another probe of s1 is under way" in text
    assert stub.ProbeUp(endless(0.1, probe=1), timeout=10).ticks
    with stub_of(plane.port, identities / "s2") as other:
        assert list(other.ProbeDown(request(0.1, probe=3), timeout=10))
    list(first)
    assert list(stub.ProbeDown(request(0.1, probe=2), timeout=10))


def test_a_probe_has_no_more_streams_than_its_limit(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_STREAMS", 1)
    first = stub.ProbeDown(request(0.5), timeout=10)
    next(first)
    text = refused(Code.INVALID_ARGUMENT, lambda: list(stub.ProbeDown(request(0.1), timeout=10)))
    assert "1 streams at most" in text
    first.cancel()


def test_a_site_that_goes_away_frees_its_turn(stub: Stub) -> None:
    call = stub.ProbeDown(request(9.0, probe=1), timeout=20)
    next(call)
    call.cancel()

    def is_free() -> bool:
        try:
            return bool(list(stub.ProbeDown(request(0.05, probe=2), timeout=10)))
        except grpc.RpcError:
            return False

    eventually(is_free)


def test_a_stream_that_falls_silent_is_cut_off(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(probe, "GRACE_S", 0.2)
    stop = time.monotonic() + 20

    def silent() -> Iterator[wire.ProbePart]:
        yield wire.ProbePart(request=request(0.2))
        while time.monotonic() < stop:
            time.sleep(0.05)

    began = time.monotonic()
    refused(Code.CANCELLED, lambda: stub.ProbeUp(silent(), timeout=15))
    stop = 0.0
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 10.5, 1e300, float("nan"), float("inf")])
def test_an_absurd_time_is_refused(stub: Stub, seconds: float) -> None:
    for call in (
        lambda: list(stub.ProbeDown(request(seconds), timeout=10)),
        lambda: stub.ProbeUp(endless(seconds), timeout=10),
    ):
        assert "ask for more than 0, up to 10" in refused(Code.INVALID_ARGUMENT, call)


def test_an_upload_without_its_request_is_refused(stub: Stub) -> None:
    for parts in ([], [wire.ProbePart(data=b"x")]):
        text = refused(
            Code.INVALID_ARGUMENT, lambda parts=parts: stub.ProbeUp(iter(parts), timeout=10)
        )
        assert "began without its request" in text


def test_a_revoked_site_may_not_probe(tmp_path: Path, bench: Bench) -> None:
    folder = tmp_path / "pki"
    pki.init(folder, ["127.0.0.1"])
    pki.issue(folder, "s1")
    with serving(bench.hub, folder) as plane, stub_of(plane.port, folder / "s1") as stub:
        assert list(stub.ProbeDown(request(0.05), timeout=10))
        pki.revoke(folder, "s1")
        for call in (
            lambda: list(stub.ProbeDown(request(0.05), timeout=10)),
            lambda: stub.ProbeUp(endless(0.05), timeout=10),
        ):
            assert "s1 is revoked" in refused(Code.UNAUTHENTICATED, call)


def test_a_contribution_arrives_whole_beside_a_probe(
    bench: Bench, plane: DataPlane, stub: Stub, identities: Path
) -> None:
    payload = random_payload(1, bench.layout)
    probing = in_thread(lambda: list(stub.ProbeDown(request(1.0), timeout=15)))
    with dialling(plane.port, identities / "s1") as link:
        link.join(bench.hello("s1"))
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
    assert probing()[-1].HasField("reply")
    contribution = bench.contribution("s1")
    assert contribution is not None and read_all(contribution.payload) == read_all(payload)


def test_ticks_are_tenths_of_a_second_from_the_first_byte() -> None:
    times = iter([100.0, 100.0, 100.05, 100.31, 100.39])
    ticks = Ticks(lambda: next(times))
    elapsed = [ticks.add(n) for n in (1, 2, 4, 8)]
    assert ticks.counts == [3, 0, 0, 12] and ticks.num_bytes == 15
    assert elapsed == pytest.approx([0.0, 0.05, 0.31, 0.39])


def test_parts_grow_with_what_was_sent_and_end_in_time() -> None:
    times = (number * 0.001 for number in range(5000))
    sizes = [len(part) for part in nothings(1.0, lambda: next(times))]
    assert sizes[0] == 1 << 14 and sizes == sorted(sizes) and sizes[-1] == 1 << 18
    assert 990 <= len(sizes) <= 1000
