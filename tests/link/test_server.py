"""Bytes that no honest site sends: refused with a reason, while others are served."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest
import zstandard

from fedwan.config import LinkConfig
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import Chunk, Part
from fedwan.link.rpc import SERVICE, Stub
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from fedwan.protocol.agreement import Claim
from tests.planes import (
    RUN,
    Bench,
    await_control,
    dialling,
    header_of,
    in_thread,
    payload_of,
    read_all,
    serving,
    stub_of,
    update_request,
)

Code = grpc.StatusCode
Upload = Callable[..., wire.Receipt]


class Setting:
    """A served coordinator at which s1 has joined by bare calls."""

    def __init__(self, bench: Bench, plane: DataPlane, stub: Stub, identities: Path) -> None:
        self.bench = bench
        self.plane = plane
        self.stub = stub
        self.identities = identities
        self.payload = payload_of(1.0, bench.layout)
        self.data = read_all(self.payload)

    def header(self, **changes: object) -> wire.UploadHeader:
        header = header_of(self.payload)
        header.session, header.chunk_bytes = "s1-first", 1 << 16
        for name, value in changes.items():
            setattr(header, name, value)
        return header

    def upload(self, *parts: Part[wire.UploadHeader]) -> wire.Receipt:
        return self.stub.Upload(iter(parts), timeout=10)

    def others_are_served(self) -> None:
        with dialling(self.plane.port, self.identities / "s2") as link:
            version = min(link.join(self.bench.hello("s2")).versions)
            receipt = link.upload(header_of(self.payload, version), self.payload)
            assert receipt.status == wire.Receipt.ACCEPTED
        assert self.bench.value("s2", version) == 1.0


@pytest.fixture
def setting(tmp_path: Path, identities: Path) -> Iterator[Setting]:
    bench = Bench(tmp_path)
    with serving(bench.hub, identities) as plane, stub_of(plane.port, identities / "s1") as stub:
        assert not stub.Join(bench.hello("s1")).refusal
        found = Setting(bench, plane, stub, identities)
        yield found
        found.others_are_served()
        assert bench.contribution("s1") is None


def refused(code: grpc.StatusCode, call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value
    return str(caught.value.details())


def test_uploads_that_no_honest_site_makes_are_refused_with_the_reason(setting: Setting) -> None:
    header, data = setting.header, setting.data
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    cases: list[tuple[dict[str, object], Chunk | None, str]] = [
        ({}, Chunk(0, bomb, 1 << 30), "claims 1073741824"),
        ({"fragment": 7}, None, "fragment 7"),
        ({"kind": 9}, None, "kind 9"),
        ({"kind": 1, "version": 3}, None, "version 3"),
        ({"kind": 1, "fragment": 1}, None, "fragment 1"),
        ({"run_id": "another"}, None, "of run another"),
    ]
    misfits = [Chunk(offset, data) for offset in (1, 1 << 16, 2**63, 2**64 - 1)]
    misfits += [Chunk(0, data + b"x"), Chunk(0, data[:-1])]
    cases += [({}, chunk, f"at {chunk.offset} does not fit") for chunk in misfits]
    for changes, chunk, says in cases:
        part = Part(header(**changes), chunk)
        assert says in refused(Code.INVALID_ARGUMENT, lambda part=part: setting.upload(part))
    stale = Part(header(session="never joined"), None)
    assert "join again" in refused(Code.FAILED_PRECONDITION, lambda: setting.upload(stale))
    for parts in ((), (Part(None, Chunk(0, data)),)):
        text = refused(Code.INVALID_ARGUMENT, lambda p=parts: setting.upload(*p))
        assert "began without its header" in text
    with stub_of(setting.plane.port, setting.identities / "s3") as stub:
        call = lambda: stub.Upload(iter([Part(header(), None)]))  # noqa: E731
        assert "has not joined this run" in refused(Code.NOT_FOUND, call)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    receipt = setting.upload(Part(header(num_bytes=10 * 10**12), None))
    assert receipt.status == wire.Receipt.REJECTED
    assert "payload of 10000000000000 bytes announced" in receipt.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
    noise = zstandard.ZstdCompressor().compress(bytes(1 << 25))
    block = Chunk(0, noise, 1 << 25)
    header_of_noise = wire.UploadHeader(kind=wire.UploadHeader.MEASUREMENT, chunk_bytes=1 << 25)
    parts = [Part(header_of_noise, None), *[Part(None, block)] * 9]
    text = refused(Code.INVALID_ARGUMENT, lambda: setting.upload(*parts))
    assert text == "a measurement has at most 268435456 bytes"
    long = header()
    long.bundle.sealed.extend([b""] * (1 << 20))  # eight times as large in memory
    text = refused(Code.INVALID_ARGUMENT, lambda: setting.upload(Part(long, None)))
    assert "is no message" in text
    # What was refused may be sent again.
    assert list(setting.upload(Part(header(), None)).missing) == [0]


def test_downloads_that_no_honest_site_asks_for_are_refused_or_bring_nothing(
    setting: Setting,
) -> None:
    setting.bench.publish(1, setting.payload)

    def ask(**changes: object) -> list[Part[wire.DownloadHeader]]:
        request = update_request()
        chunks = changes.pop("chunks", ())
        for name, value in changes.items():
            setattr(request, name, value)
        request.chunks.extend(chunks)  # type: ignore[arg-type]
        return list(setting.stub.Download(request, timeout=10))

    for changes, code, says in [
        ({"kind": 9}, Code.INVALID_ARGUMENT, ""),
        ({"fragment": 3}, Code.INVALID_ARGUMENT, "fragment 3"),
        ({"kind": 4, "version": 0}, Code.INVALID_ARGUMENT, "a measurement of 0 bytes; ask for 1"),
        ({"kind": 4, "version": 2**63}, Code.INVALID_ARGUMENT, "ask for 1 to 268435456"),
        ({"run_id": "another"}, Code.FAILED_PRECONDITION, "is of run another, this is run-1"),
        ({"chunks": [0] * 1_000_000}, Code.INVALID_ARGUMENT, "1000000 chunks asked for where"),
        ({"chunks": [0] * 2_000_000}, Code.INVALID_ARGUMENT, "is no message"),
    ]:
        assert says in refused(code, lambda changes=changes: ask(**changes))
    for num_chunks in (1, 0):  # which were sent already
        first, *others = ask(transfer=2**64 - 1)
        assert first.header is not None and first.header.status == wire.DownloadHeader.READY
        assert first.chunk is None and [part.header for part in others] == [None] * num_chunks
    (part,) = ask(chunks=[77])
    assert part.chunk is None
    setting.bench.withdraw()


def test_garbage_in_place_of_a_message_is_refused(setting: Setting) -> None:
    channel = grpc.secure_channel(
        f"127.0.0.1:{setting.plane.port}",
        Identity.load(setting.identities / "s1").grpc_channel_credentials(),
    )
    garbage = bytes(range(256)) * 40
    with channel:
        for call in (
            lambda: channel.unary_unary(f"/{SERVICE}/Join")(garbage, timeout=5),
            lambda: channel.stream_unary(f"/{SERVICE}/Upload")(iter([garbage]), timeout=5),
            lambda: list(channel.unary_stream(f"/{SERVICE}/Download")(garbage, timeout=5)),
            lambda: list(channel.stream_stream(f"/{SERVICE}/Control")(iter([garbage]), timeout=5)),
        ):
            refused(Code.INVALID_ARGUMENT, call)
        nothing = channel.unary_unary(f"/{SERVICE}/Nothing")
        refused(Code.UNIMPLEMENTED, lambda: nothing(b"", timeout=5))


# What many calls cost ----------------------------------------------------------------------------


def test_weights_that_nobody_reads_are_in_memory_once(tmp_path: Path, identities: Path) -> None:
    bench = Bench(tmp_path, num_values=8_000_000)
    request = wire.DownloadRequest(run_id=RUN, kind=wire.DownloadRequest.GLOBAL)
    num_bytes = 4 * 8_000_000
    with ExitStack() as stack:
        plane = stack.enter_context(serving(bench.hub, identities, num_sites=2))
        stubs = [stack.enter_context(stub_of(plane.port, identities / s)) for s in ("s1", "s2")]
        for site, stub in zip(("s1", "s2"), stubs, strict=True):
            assert not stub.Join(bench.hello(site), timeout=10).refusal
        before = psutil.Process().memory_info().rss
        calls = [stub.Download(request) for stub in stubs for _ in range(20)]
        for call in calls:
            stack.callback(call.cancel)
            assert next(call).header.status == wire.DownloadHeader.READY  # and no more
        assert psutil.Process().memory_info().rss - before < 3 * num_bytes


def test_others_go_on_while_a_join_is_read(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement, is_reading, go_on = setting.bench.hub.agreement, threading.Event(), threading.Event()

    def slowly(claim: Claim, checkpoint: int) -> Claim:
        is_reading.set()
        assert go_on.wait(20)
        return claim

    monkeypatch.setattr(agreement, "claim", slowly)
    hello = setting.bench.hello("s1", "another")
    layout = hello.layout_json
    hello.layout_json = " " * (24 << 20)
    text = refused(Code.INVALID_ARGUMENT, lambda: setting.stub.Join(hello, timeout=20))
    assert "no message" in text
    hello.layout_json = " " * (5 << 20)
    answer = setting.stub.Join(hello, timeout=20)
    assert "layout_json of 5242880 characters, 4194304 are taken" in answer.refusal
    hello.layout_json = layout + " " * ((4 << 20) - len(layout))
    joining = in_thread(lambda: setting.stub.Join(hello, timeout=20))
    assert is_reading.wait(10)
    monkeypatch.undo()
    setting.others_are_served()
    assert joining.is_running()
    go_on.set()
    joining()


def test_a_site_hears_at_once_that_a_coordinator_was_started_again(
    tmp_path: Path, identities: Path
) -> None:
    """In the middle of its steps, when it has nothing to send."""
    before, after = Bench(tmp_path / "before"), Bench(tmp_path / "after")
    with serving(before.hub, identities) as plane:
        port = plane.port
        with dialling(port, identities / "s1") as link:
            link.join(before.hello("s1"))
            await_control(before, link, "s1")
            plane.stop(0.1)
            config = LinkConfig(listen=f"127.0.0.1:{port}")
            with serving(after.hub, identities, config):
                signal = link.signals.get(timeout=30.0)
    assert signal.kind == wire.CoordinatorSignal.NOT_JOINED
    assert signal.text == "site 's1' has not joined this run; join first"
