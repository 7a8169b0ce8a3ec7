"""A download's chunks find their place, or are refused."""

from __future__ import annotations

import pytest

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.download import Incoming
from fedwan.link.framing import Chunk, make_chunk


def incoming(num_bytes: int = 10, chunk_bytes: int = 4) -> Incoming:
    return Incoming(wire.DownloadHeader(num_bytes=num_bytes, chunk_bytes=chunk_bytes))


def test_chunks_in_any_order_make_the_payload() -> None:
    transfer = incoming()
    transfer.store(make_chunk(8, b"ij"))
    transfer.store(make_chunk(0, b"abcd"))
    assert transfer.missing() == [1]
    transfer.store(make_chunk(4, b"efgh"))
    assert transfer.missing() == []
    assert bytes(transfer.buffer.read(0, 10)) == b"abcdefghij"


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(0, 1, b"abcd"),
        make_chunk(1, b"abcd"),
        make_chunk(8, b"abcd"),
        make_chunk(12, b""),
        make_chunk(0, b"a"),
    ],
)
def test_a_chunk_that_is_damaged_or_misplaced_is_refused(chunk: Chunk) -> None:
    transfer = incoming()
    with pytest.raises(PayloadError):
        transfer.store(chunk)
    assert transfer.missing() == [0, 1, 2]
