"""Chunks of one payload, in any order and from any number of stripes."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from fedwan.coordinator.reception import MIN_CHUNK_BYTES, SPOOL_BYTES, ChunkedReception
from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer

CHUNK = MIN_CHUNK_BYTES


def make(folder: Path, num_bytes: int, chunk_bytes: int = CHUNK) -> ChunkedReception:
    header = wire.UploadHeader(num_bytes=num_bytes, chunk_bytes=chunk_bytes)
    return ChunkedReception(header, folder)


def chunks_of(data: bytes, chunk_bytes: int = CHUNK) -> list[tuple[int, bytes]]:
    return [(at, data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]


@pytest.mark.parametrize("num_bytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7])
def test_chunks_in_any_order_make_the_payload(num_bytes: int, tmp_path: Path) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    reception = make(tmp_path, num_bytes)
    chunks = chunks_of(data)
    random.Random(0).shuffle(chunks)
    for offset, chunk in chunks:
        assert reception.claim() is None
        reception.write(offset, chunk)
    payload = reception.claim()
    assert payload is not None and bytes(payload.read(0, num_bytes)) == data


def test_only_the_first_to_claim_gets_the_payload(tmp_path: Path) -> None:
    reception = make(tmp_path, 3)
    reception.write(0, b"abc")
    assert reception.claim() is not None
    assert reception.claim() is None


def test_what_is_missing_is_known(tmp_path: Path) -> None:
    reception = make(tmp_path, 4 * CHUNK)
    reception.write(CHUNK, bytes(CHUNK))
    reception.write(CHUNK, bytes(CHUNK))
    assert reception.missing() == [0, 2, 3]


def test_a_chunk_that_came_again_changes_nothing(tmp_path: Path) -> None:
    reception = make(tmp_path, 2 * CHUNK)
    for offset in (0, CHUNK):
        reception.write(offset, b"a" * CHUNK)
    payload = reception.claim()
    reception.write(0, b"b" * CHUNK)  # after the bytes were checked
    assert payload is not None and bytes(payload.read(0, CHUNK)) == b"a" * CHUNK


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 0), (0, CHUNK - 1), (0, CHUNK + 1), (1, CHUNK), (2 * CHUNK, CHUNK), (9 * CHUNK, 1)],
)
def test_a_chunk_that_does_not_fit_is_refused(offset: int, size: int, tmp_path: Path) -> None:
    reception = make(tmp_path, 2 * CHUNK + 1)
    with pytest.raises(PayloadError, match=f"chunk of {size} bytes at {offset}"):
        reception.write(offset, bytes(size))
    assert reception.missing() == [0, 1, 2]


@pytest.mark.parametrize("chunk_bytes", [0, 1, MIN_CHUNK_BYTES - 1])
def test_chunks_so_small_that_they_would_exhaust_memory_are_refused(
    chunk_bytes: int, tmp_path: Path
) -> None:
    with pytest.raises(PayloadError, match="are too small"):
        make(tmp_path, 1 << 40, chunk_bytes)


def test_a_large_payload_is_spooled_to_a_file_without_a_name(tmp_path: Path) -> None:
    chunk = 1 << 20
    data = random.Random(1).randbytes(SPOOL_BYTES + 5)
    reception = make(tmp_path, len(data), chunk)
    for offset, part in chunks_of(data, chunk):
        reception.write(offset, part)
    payload = reception.claim()
    assert payload is not None and bytes(payload.read(0, len(data))) == data
    assert list(tmp_path.iterdir()) == []
    reception.close()


def test_a_failed_write_leaves_its_chunk_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(buffer: Buffer, offset: int, data: bytes) -> None:
        raise OSError("No space left on device")

    reception = make(tmp_path, 2 * CHUNK)
    reception.write(0, bytes(CHUNK))
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "write", full)
        with pytest.raises(OSError, match="No space"):
            reception.write(CHUNK, bytes(CHUNK))
    assert reception.missing() == [1]
    reception.write(CHUNK, bytes(CHUNK))
    assert reception.claim() is not None


def test_stripes_may_write_at_the_same_time(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(200 * CHUNK)
    reception = make(tmp_path, len(data))
    claims: list[object] = []

    def stripe(seed: int) -> None:
        chunks = chunks_of(data)
        random.Random(seed).shuffle(chunks)
        for offset, chunk in chunks:
            reception.write(offset, chunk)
            if (payload := reception.claim()) is not None:
                claims.append(bytes(payload.read(0, len(data))) == data)

    threads = [threading.Thread(target=stripe, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert claims == [True]
