"""A download's chunks find their place, and no slow channel keeps the others waiting."""

from __future__ import annotations

import pytest

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import Chunk, make_chunk
from fedwan.link.incoming import Incoming, Share, Shares


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


def come(shares: Shares, share: Share, num: int, seconds_each: float) -> bool:
    is_over = False
    for _ in range(num):
        is_over = shares.arrived(share, share.elapsed_s + seconds_each)
    return is_over


def test_a_channel_that_is_done_takes_half_of_what_the_slowest_has_left() -> None:
    shares = Shares([range(0, 30, 3), range(1, 30, 3), range(2, 30, 3)])
    shares.answered(0.1)
    fast, slow, slower = (shares.first(index) for index in range(3))
    assert not come(shares, fast, 10, 0.1)
    come(shares, slow, 5, 0.2)
    come(shares, slower, 2, 0.5)
    taken = shares.steal()
    assert taken is not None and taken.chunks == [20, 23, 26, 29]
    assert slower.chunks == [2, 5, 8, 11, 14, 17]
    assert not come(shares, slower, 3, 0.5)
    assert come(shares, slower, 1, 0.5)  # more were asked for, and are not wanted


def test_what_is_nearly_there_is_not_taken() -> None:
    shares = Shares([[0], [1, 2, 3, 4]])
    shares.answered(0.2)
    come(shares, shares.first(0), 1, 0.2)
    come(shares, shares.first(1), 1, 0.15)  # 0.45 s left, asking takes 0.2 s
    assert shares.steal() is None


def test_a_channel_that_gives_no_sign_of_life_is_relieved() -> None:
    shares = Shares([[0], [1, 2, 3, 4]])
    shares.answered(0.2)
    come(shares, shares.first(0), 1, 0.2)
    assert [share.chunks for share in (shares.steal(), shares.steal()) if share] == [[3, 4], [2]]


def test_every_chunk_belongs_to_one_share() -> None:
    shares = Shares([range(0, 100, 2), range(1, 100, 2)])
    shares.answered(0.0)
    all_shares = [shares.first(0), shares.first(1)]
    while (share := shares.steal()) is not None:
        all_shares.append(share)
    assert sorted(chunk for share in all_shares for chunk in share.chunks) == list(range(100))
    assert all(share.num_left <= 1 for share in all_shares)


def test_a_single_chunk_is_left_where_it_is() -> None:
    shares = Shares([[0], [1]])
    shares.answered(0.0)
    assert shares.steal() is None
