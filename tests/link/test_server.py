"""Bytes that no honest site sends: refused with a reason, while others are served."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import zstandard

from fedwan.errors import ConfigError
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import Part, plain
from fedwan.link.rpc import SERVICE, Stub
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from tests.planes import (
    RUN,
    Bench,
    dialling,
    header_of,
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
        receipt: wire.Receipt = self.stub.Upload(iter(parts), timeout=10)
        return receipt

    def others_are_served(self) -> None:
        with dialling(self.plane.port, self.identities / "s2") as link:
            version = min(link.join(self.bench.hello("s2")).versions)
            receipt = link.upload(header_of(self.payload, version), self.payload)
            assert receipt.status == wire.Receipt.ACCEPTED
        assert self.bench.value("s2", version) == 1.0


@pytest.fixture
def setting(tmp_path: Path, identities: Path) -> Iterator[Setting]:
    bench = Bench(tmp_path)
    with (
        serving(bench.hub, identities) as plane,
        stub_of(plane.port, identities / "s1") as stub,
    ):
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


def test_ten_terabytes_announced_allocate_nothing(setting: Setting) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    receipt = setting.upload(Part(setting.header(num_bytes=10 * 10**12), None))
    assert receipt.status == wire.Receipt.REJECTED
    assert "payload of 10000000000000 bytes announced" in receipt.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_a_chunk_outside_the_payload_or_of_another_length_is_refused(setting: Setting) -> None:
    chunks = [plain(offset, setting.data) for offset in (1, 1 << 16, 2**63, 2**64 - 1)]
    chunks += [plain(0, setting.data + b"x"), plain(0, setting.data[:-1])]
    for chunk in chunks:
        part = Part(setting.header(), chunk)
        text = refused(Code.INVALID_ARGUMENT, lambda part=part: setting.upload(part))
        assert f"at {chunk.offset} does not fit" in text


def test_a_chunk_with_a_wrong_checksum_is_refused_and_may_be_sent_again(setting: Setting) -> None:
    chunk = plain(0, setting.data)
    part = Part(setting.header(), chunk._replace(checksum=1))
    assert "damaged" in refused(Code.INVALID_ARGUMENT, lambda: setting.upload(part))
    assert list(setting.upload(Part(setting.header(), None)).missing) == [0]


def test_a_bomb_is_refused_before_it_goes_off(setting: Setting) -> None:
    num_bytes = 1 << 30
    frame = zstandard.ZstdCompressor().compress(bytes(num_bytes))
    assert len(frame) < 100_000
    part = Part(setting.header(), plain(0, frame)._replace(raw_bytes=num_bytes))
    text = refused(Code.INVALID_ARGUMENT, lambda: setting.upload(part))
    assert f"claims {num_bytes} bytes" in text


def test_an_upload_without_a_header_is_refused(setting: Setting) -> None:
    for parts in ((), (Part(None, plain(0, setting.data)),)):
        text = refused(Code.INVALID_ARGUMENT, lambda p=parts: setting.upload(*p))
        assert "began without its header" in text


def test_an_upload_of_what_the_run_has_not_is_refused(setting: Setting) -> None:
    absent = ({"fragment": 7}, {"kind": 9}, {"kind": 1, "version": 3}, {"run_id": "another"})
    for changes in absent:
        part = Part(setting.header(**changes), None)
        refused(Code.INVALID_ARGUMENT, lambda part=part: setting.upload(part))


def test_an_upload_before_join_or_from_another_session_is_refused(setting: Setting) -> None:
    part = Part(setting.header(session="never joined"), None)
    assert "join again" in refused(Code.FAILED_PRECONDITION, lambda: setting.upload(part))
    with stub_of(setting.plane.port, setting.identities / "s3") as stub:
        text = refused(
            Code.FAILED_PRECONDITION, lambda: stub.Upload(iter([Part(setting.header(), None)]))
        )
    assert "has not joined this run" in text


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
        refused(
            Code.UNIMPLEMENTED,
            lambda: channel.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=5),
        )


def test_the_same_chunk_five_thousand_times_is_harmless(setting: Setting) -> None:
    header = setting.header(chunk_bytes=1 << 10)
    part: Part[wire.UploadHeader] = Part(None, plain(0, setting.data[: 1 << 10]))

    def parts() -> Iterator[Part[wire.UploadHeader]]:
        yield Part(header, None)
        for _ in range(5000):
            yield part

    receipt = setting.stub.Upload(parts(), timeout=20)
    assert receipt.status == wire.Receipt.INCOMPLETE and list(receipt.missing) == [1, 2, 3]


def test_a_huge_list_of_chunks_is_refused(setting: Setting) -> None:
    setting.bench.publish(1, setting.payload)
    request = update_request()
    request.chunks.extend([0] * 1_000_000)
    text = refused(Code.INVALID_ARGUMENT, lambda: list(setting.stub.Download(request, timeout=10)))
    assert "1000000 chunks asked for where there are 1" in text
    setting.bench.withdraw()


def test_chunks_that_do_not_exist_or_were_sent_already_bring_nothing(setting: Setting) -> None:
    setting.bench.publish(1, setting.payload)
    request = update_request()
    request.transfer = 2**64 - 1
    for num_chunks in (1, 0):
        first, *others = setting.stub.Download(request, timeout=10)
        assert first.header.status == wire.DownloadHeader.READY and first.chunk is None
        assert [part.header for part in others] == [None] * num_chunks
    request = update_request()
    request.chunks.extend([77])
    (part,) = setting.stub.Download(request, timeout=10)
    assert part.chunk is None
    setting.bench.withdraw()


def test_a_download_of_what_the_run_has_not_is_refused(setting: Setting) -> None:
    requests = (
        wire.DownloadRequest(run_id=RUN, kind=9),  # type: ignore[arg-type]
        wire.DownloadRequest(run_id=RUN, fragment=3, version=1),
    )
    for request in requests:
        refused(Code.INVALID_ARGUMENT, lambda r=request: list(setting.stub.Download(r, timeout=10)))


def test_a_download_for_another_run_is_refused(setting: Setting) -> None:
    request = update_request()
    request.run_id = "another"
    text = refused(
        Code.FAILED_PRECONDITION, lambda: list(setting.stub.Download(request, timeout=10))
    )
    assert "download is of run another, this is run-1" in text


def test_a_port_in_use_is_the_user_s_to_mend(setting: Setting, identities: Path) -> None:
    port = setting.plane.port
    identity = Identity.load(identities / "coordinator", "coordinator")
    with pytest.raises(ConfigError) as caught:
        DataPlane(setting.bench.hub, identity, "127.0.0.1", port, 1, 1.0)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert f"127.0.0.1:{port}" in str(caught.value) and "link.listen" in str(caught.value)
