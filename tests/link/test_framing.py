"""Framing by hand against protobuf's own."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import (
    Chunk,
    Part,
    download_part,
    is_intact,
    make_chunk,
    serialize,
    upload_part,
)

U64 = st.integers(0, 2**64 - 1)
CHUNKS = st.none() | st.builds(Chunk, U64, U64, st.binary(max_size=300), st.integers(0, 2**32 - 1))
UPLOAD_HEADERS = st.none() | st.builds(
    wire.UploadHeader,
    run_id=st.text(max_size=5),
    version=U64,
    num_bytes=U64,
    work=st.none() | st.builds(wire.Work, losses=st.dictionaries(st.text(max_size=3), st.floats())),
)
DOWNLOAD_HEADERS = st.none() | st.builds(wire.DownloadHeader, version=U64, checksum=U64)


def by_protobuf(kind: type, part: Part) -> bytes:
    message = kind()
    if part.header is not None:
        message.header.CopyFrom(part.header)
    if part.chunk is not None:
        offset, checksum, data, raw_bytes = part.chunk
        chunk = wire.Chunk(offset=offset, checksum=checksum, raw_bytes=raw_bytes, data=bytes(data))
        message.chunk.CopyFrom(chunk)
    return message.SerializeToString(deterministic=True)


def assert_same(found: Part, expected: Part) -> None:
    assert found.header == expected.header
    assert (found.chunk is None) == (expected.chunk is None)
    if found.chunk is not None and expected.chunk is not None:
        assert found.chunk[:2] == expected.chunk[:2]
        assert found.chunk.raw_bytes == expected.chunk.raw_bytes
        assert bytes(found.chunk.data) == bytes(expected.chunk.data)


@given(UPLOAD_HEADERS, CHUNKS)
def test_an_upload_part_is_byte_for_byte_what_protobuf_writes(
    header: wire.UploadHeader | None, chunk: Chunk | None
) -> None:
    part = Part(header, chunk)
    written = serialize(part)
    if header is None or len(header.work.losses) < 2:  # a map's order is nobody's promise
        assert written == by_protobuf(wire.UploadPart, part)
    assert part.ByteSize() == len(written)
    assert_same(upload_part(written), part)
    assert wire.UploadPart.FromString(written).chunk.data == (chunk.data if chunk else b"")


@given(DOWNLOAD_HEADERS, CHUNKS)
def test_a_download_part_is_byte_for_byte_what_protobuf_writes(
    header: wire.DownloadHeader | None, chunk: Chunk | None
) -> None:
    part = Part(header, chunk)
    assert serialize(part) == by_protobuf(wire.DownloadPart, part)
    assert_same(download_part(by_protobuf(wire.DownloadPart, part)), part)


@given(DOWNLOAD_HEADERS, CHUNKS)
def test_fields_in_another_order_are_read_as_protobuf_reads_them(
    header: wire.DownloadHeader | None, chunk: Chunk | None
) -> None:
    head = serialize(Part(header, None))
    rest = serialize(Part(None, chunk))
    assert_same(download_part(rest + head), Part(header, chunk))
    if chunk is not None:
        backwards = b"\x22" + bytes([len(chunk.data) % 100]) + bytes(len(chunk.data) % 100)
        backwards += b"\x11" + chunk.checksum.to_bytes(8, "little")
        odd = b"\x12" + bytes([len(backwards)]) + backwards
        assert download_part(odd).chunk == Chunk(0, chunk.checksum, bytes(len(chunk.data) % 100))


@given(st.binary(max_size=80))
def test_any_bytes_are_read_as_protobuf_reads_them_or_refused_as_it_refuses(data: bytes) -> None:
    try:
        expected = wire.UploadPart.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            upload_part(data)
        return
    found = upload_part(data)
    assert found.header == (expected.header if expected.HasField("header") else None)
    assert (found.chunk is not None) == expected.HasField("chunk")
    if found.chunk is not None:
        chunk = expected.chunk
        assert found.chunk[:2] == (chunk.offset, chunk.checksum)
        assert found.chunk.raw_bytes == chunk.raw_bytes
        assert bytes(found.chunk.data) == chunk.data


@given(st.binary(max_size=200), st.data())
def test_a_cut_message_is_never_read_as_a_whole_one(data: bytes, draw: st.DataObject) -> None:
    written = serialize(Part(None, make_chunk(7, data)))
    cut = written[: draw.draw(st.integers(1, len(written) - 1))]
    with pytest.raises(DecodeError):
        upload_part(cut)


def test_a_chunk_is_parsed_without_a_copy() -> None:
    written = serialize(Part(None, make_chunk(0, bytes(1000))))
    chunk = upload_part(written).chunk
    assert chunk is not None and isinstance(chunk.data, memoryview)
    assert chunk.data.obj is written


def test_a_flipped_bit_shows_in_the_checksum() -> None:
    chunk = make_chunk(0, b"abc")
    assert is_intact(chunk) and not is_intact(chunk._replace(data=b"abd"))
