"""Messages with chunks: read as they were written, and refused when they are cut."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import Chunk, Part, is_intact, make_chunk, parser, serialize

upload_part, download_part = parser(wire.UploadHeader), parser(wire.DownloadHeader)
U64 = st.integers(0, 2**64 - 1)
CHUNKS = st.none() | st.builds(
    Chunk, U64, U64, st.binary(min_size=1, max_size=300), st.integers(0, 2**32 - 1)
)
UPLOAD_HEADERS = st.none() | st.builds(
    wire.UploadHeader,
    run_id=st.text(max_size=5),
    version=U64,
    num_bytes=st.integers(1, 2**64 - 1),
    work=st.none() | st.builds(wire.Work, losses=st.dictionaries(st.text(max_size=3), st.floats())),
)


@given(UPLOAD_HEADERS, CHUNKS)
def test_a_message_is_read_as_it_was_written(
    header: wire.UploadHeader | None, chunk: Chunk | None
) -> None:
    part = Part(header, chunk)
    written = serialize(part)
    assert part.ByteSize() == len(written)
    found = upload_part(written)
    assert (found.header is None) == (header is None)
    if found.header is not None and header is not None:
        assert found.header.SerializeToString(deterministic=True) == header.SerializeToString(
            deterministic=True
        )
    assert (found.chunk is None) == (chunk is None)
    if found.chunk is not None and chunk is not None:
        assert found.chunk._replace(data=bytes(found.chunk.data)) == chunk


@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_a_decode_error(data: bytes) -> None:
    try:
        found = download_part(data)
    except DecodeError:
        return
    assert found.chunk is None or len(found.chunk.data) <= len(data)


@given(st.data())
def test_a_cut_header_is_never_read_as_a_whole_one(draw: st.DataObject) -> None:
    written = serialize(Part(wire.UploadHeader(run_id="run-1", version=7), None))
    cut = written[: draw.draw(st.integers(0, len(written) - 1))]
    with pytest.raises(DecodeError):
        upload_part(cut)


@given(st.binary(min_size=2, max_size=200), st.data())
def test_a_cut_chunk_is_a_decode_error_or_shows_in_the_checksum(
    data: bytes, draw: st.DataObject
) -> None:
    written = serialize(Part(None, make_chunk(7, data)))
    cut = written[: draw.draw(st.integers(0, len(written) - 1))]
    try:
        chunk = upload_part(cut).chunk
    except DecodeError:
        return
    assert chunk is None or not is_intact(chunk)


def test_a_chunk_is_parsed_without_a_copy() -> None:
    written = serialize(Part(None, make_chunk(0, bytes(1000))))
    chunk = upload_part(written).chunk
    assert chunk is not None and isinstance(chunk.data, memoryview)
    assert chunk.data.obj is written


def test_a_flipped_bit_shows_in_the_checksum() -> None:
    chunk = make_chunk(0, b"abc")
    assert is_intact(chunk) and not is_intact(chunk._replace(data=b"abd"))
