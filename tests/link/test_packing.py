"""Chunks packed on their way: the same bytes at the end, fewer between, and no lie believed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fedwan.codecs import codec_by_name
from fedwan.errors import PayloadError
from fedwan.link import packing
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import Chunk, is_intact, make_chunk
from fedwan.link.packing import FAST, LEAST_BYTES, PackedOnce, Packing, pack, unpack
from tests.planes import (
    Bench,
    dialling,
    header_of,
    random_payload,
    read_all,
    serving,
    update_request,
)

MOST = 1 << 20


def coded(codec: str, num_values: int = 400_000) -> bytes:
    """What a codec makes of normal values."""
    value = torch.randn(num_values, generator=torch.Generator().manual_seed(0))
    data, _ = codec_by_name(codec).encode_tensor(value, None)
    return bytes(data)


@given(st.binary(max_size=500) | st.builds(bytes, st.integers(0, 5000)))
def test_a_chunk_is_unpacked_to_what_it_was(data: bytes) -> None:
    chunk = pack(7, data)
    assert is_intact(chunk) and chunk.offset == 7
    assert bytes(unpack(chunk, max(1, len(data)))) == data
    assert chunk.raw_bytes in (0, len(data))
    assert len(chunk.data) <= len(data)


@pytest.mark.parametrize(
    ("codec", "most"), [("int4", 0.86), ("bf16", 0.80), ("int8", 0.95), ("fp32", 0.94)]
)
def test_normal_values_lose_what_their_codes_do_not_need(codec: str, most: float) -> None:
    data = coded(codec)
    chunk = pack(0, data)
    assert chunk.raw_bytes == len(data) and len(chunk.data) < most * len(data)


def test_noise_travels_as_it_is_without_a_copy() -> None:
    data = torch.randint(0, 256, (MOST,), dtype=torch.uint8).numpy().data
    chunk = pack(0, data)
    assert not chunk.raw_bytes and chunk.data is data


def frame(data: bytes, **options: bool) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(**options).compress(data)
    return packed


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
        unpack(make_chunk(5, data, raw_bytes), MOST)


@given(st.data())
def test_a_damaged_frame_never_gives_more_than_it_may(draw: st.DataObject) -> None:
    packed = bytearray(frame(b"some text " * 40))
    packed[draw.draw(st.integers(0, len(packed) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        assert len(unpack(make_chunk(0, bytes(packed), 400), MOST)) == 400
    except PayloadError:
        pass


def test_a_slow_link_is_packed_and_a_fast_one_is_not() -> None:
    packing = Packing("auto")
    assert packing.is_on
    packing.note(LEAST_BYTES - 1, 1e-9)
    assert packing.is_on  # too short to tell
    packing.note(LEAST_BYTES, LEAST_BYTES / (0.9 * FAST))
    assert packing.is_on
    packing.note(LEAST_BYTES, LEAST_BYTES / (1.1 * FAST))
    assert not packing.is_on
    packing.note(LEAST_BYTES, LEAST_BYTES / (0.6 * FAST))
    assert not packing.is_on
    packing.note(LEAST_BYTES, LEAST_BYTES / (0.4 * FAST))
    assert packing.is_on


@pytest.mark.parametrize(("compression", "is_on"), [("zstd", True), ("none", False)])
def test_a_settled_link_stays_as_it_is(compression: str, is_on: bool) -> None:
    packing = Packing(compression)
    for rate in (0.1 * FAST, 10 * FAST):
        packing.note(LEAST_BYTES, LEAST_BYTES / rate)
        assert packing.is_on is is_on


def test_a_chunk_is_packed_once_for_all_sites() -> None:
    data = coded("int4")
    reads: list[int] = []
    once = PackedOnce()
    found: list[Chunk] = []

    def ask() -> None:
        found.append(once.chunk(1, 0, lambda: reads.append(0) or data))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1 and len(found) == 8 and len(set(map(id, found))) == 1
    assert bytes(unpack(found[0], MOST)) == data
    other = once.chunk(2, 0, lambda: coded("bf16"))
    assert bytes(unpack(other, MOST)) == coded("bf16")


def test_packed_chunks_are_dropped_when_they_are_too_many() -> None:
    data = coded("int4")
    size = len(pack(0, data).data)
    once, reads = PackedOnce(keep_bytes=3 * size), [0] * 5
    for offset in (0, 1, 2, 3, 4, 4, 3, 2, 0):

        def read(offset: int = offset) -> bytes:
            reads[offset] += 1
            return data

        assert bytes(unpack(once.chunk(1, offset, read), MOST)) == data
    assert reads == [2, 1, 1, 1, 1]


def test_noise_is_tried_once_and_forgotten_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_SLOTS", 3)
    tried: list[int] = []
    monkeypatch.setattr(packing, "_packed", lambda data: tried.append(len(data)))
    once = PackedOnce()
    for offset in (0, 0, 1, 2, 3, 3, 0):  # the last 0 was dropped before
        assert once.chunk(1, offset, lambda: b"noise") == make_chunk(offset, b"noise")
    assert len(tried) == 5


@pytest.mark.parametrize("channels", [1, 3])
def test_packed_payloads_arrive_as_they_are_in_fewer_bytes(
    tmp_path: Path, identities: Path, channels: int
) -> None:
    bench = Bench(tmp_path, num_values=1_500_000)
    bench.set_model()
    up, down = random_payload(1, bench.layout), random_payload(2, bench.layout)
    with (
        serving(bench.hub, identities) as plane,
        dialling(plane.port, identities / "s1", channels=channels, compression="zstd") as link,
    ):
        link.join(bench.hello("s1"))
        assert link.upload(header_of(up), up).status == wire.Receipt.ACCEPTED
        contribution = bench.contribution("s1")
        assert contribution is not None and read_all(contribution.payload) == read_all(up)
        assert link.bytes_up < 0.95 * up.num_bytes
        bench.publish(1, down)
        before = link.bytes_down
        delivery = link.download(update_request())
        assert delivery.payload is not None and read_all(delivery.payload) == read_all(down)
        assert link.bytes_down - before < 0.95 * down.num_bytes
        bench.intake.forget(0, 0)
