"""Messages with chunks, packed or not: read as they were written, refused when they lie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fedwan.codecs import codec_by_name
from fedwan.errors import PayloadError
from fedwan.link import framing
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import (
    FAST,
    LEAST_BYTES,
    Chunk,
    PackedOnce,
    Packing,
    Part,
    pack,
    parser,
    serialize,
    unpack,
)

MOST = 1 << 20

upload_part, download_part = parser(wire.UploadHeader), parser(wire.DownloadHeader)


@pytest.mark.parametrize("header", [None, wire.UploadHeader(run_id="é", version=2**64 - 1)])
@pytest.mark.parametrize("chunk", [None, Chunk(2**64 - 1, b"x" * 300, 2**32 - 1)])
def test_a_message_is_read_as_it_was_written(
    header: wire.UploadHeader | None, chunk: Chunk | None
) -> None:
    found = upload_part(serialize(Part(header, chunk)))
    assert found.header == header and (found.chunk is None) == (chunk is None)
    assert found.chunk is None or found.chunk._replace(data=bytes(found.chunk.data)) == chunk


@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_a_decode_error(data: bytes) -> None:
    try:
        found = download_part(data)
    except DecodeError:
        return
    assert found.chunk is None or len(found.chunk.data) <= len(data)


def coded(codec: str, num_values: int = 400_000) -> bytes:
    """What a codec makes of normal values."""
    value = torch.randn(num_values, generator=torch.Generator().manual_seed(0))
    data, _ = codec_by_name(codec).encode_tensor(value, None)
    return bytes(data)


@given(st.binary(max_size=500) | st.builds(bytes, st.integers(0, 5000)))
def test_a_chunk_is_unpacked_to_what_it_was(data: bytes) -> None:
    chunk = pack(7, data)
    assert chunk.offset == 7
    assert bytes(unpack(chunk, max(1, len(data)))) == data
    assert chunk.raw_bytes in (0, len(data))
    assert len(chunk.data) <= len(data)


@pytest.mark.parametrize(("codec", "most"), [("int4", 0.86), ("bf16", 0.80), ("fp32", 0.94)])
def test_normal_values_lose_what_their_codes_do_not_need_and_noise_nothing(
    codec: str, most: float
) -> None:
    data = coded(codec)
    chunk = pack(0, data)
    assert chunk.raw_bytes == len(data) and len(chunk.data) < most * len(data)
    noise = torch.randint(0, 256, (MOST,), dtype=torch.uint8).numpy().data
    assert pack(0, noise).data is noise  # no copy
    written = serialize(Part(None, Chunk(0, data)))
    found = upload_part(written).chunk
    assert found is not None and isinstance(found.data, memoryview) and found.data.obj is written


def frame(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize(
    ("data", "raw_bytes"),
    [
        (frame(bytes(1000)), 999),
        (frame(bytes(1000)), 1001),
        (frame(bytes(2 * MOST)), 2 * MOST),
        (frame(bytes(1 << 30)), 100),
        (frame(bytes(1000)) + b"more", 1000),
        (frame(bytes(1000))[:-1], 1000),
        (frame(bytes(1000), write_content_size=False), 1000),
        (b"no frame at all", 1000),
        (b"", 1000),
    ],
)
def test_a_frame_that_lies_is_refused(data: bytes, raw_bytes: int) -> None:
    with pytest.raises(PayloadError, match="chunk at 5"):
        unpack(Chunk(5, data, raw_bytes), MOST)


def test_a_slow_link_is_packed_and_a_fast_one_is_not() -> None:
    packing, never = Packing(), Packing(is_allowed=False)
    assert packing.is_on
    packing.note(LEAST_BYTES - 1, 1e-9)
    assert packing.is_on  # too short to tell
    for rate, is_on in ((0.9, True), (1.1, False), (0.6, False), (0.4, True)):
        for one in (packing, never):
            one.note(LEAST_BYTES, LEAST_BYTES / (rate * FAST))
        assert (packing.is_on, never.is_on) == (is_on, False)


def test_a_chunk_is_packed_once_for_all_sites_and_kept_while_there_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "KEEP_CHUNKS", 2)
    once, reads, data, noise = PackedOnce(), [0] * 4, coded("int4", 4096), bytes(range(256))

    def ask(offset: int) -> Chunk:
        def read() -> bytes:
            reads[offset] += 1
            return data if offset else noise

        return once.chunk(1, offset, read)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, [1] * 8))
    assert reads[1] == 1 and len(set(map(id, found))) == 1
    for offset in (0, 2, 3, 3, 1, 0):
        assert bytes(unpack(ask(offset), MOST)) == (data if offset else noise)
    assert reads == [2, 2, 1, 1], "noise is not kept, and of others the last two"
    with pytest.raises(ZeroDivisionError):
        once.chunk(1, 9, lambda: bytes(1 // 0))
    assert bytes(once.chunk(1, 9, lambda: b"read again").data) == b"read again"
