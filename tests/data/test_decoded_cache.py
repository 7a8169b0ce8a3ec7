"""Decoded samples in memory."""

from __future__ import annotations

import torch

from fedwan.data.decoded_cache import DecodedCache

SHAPE = (3, 8, 8)


def sample(value: int) -> torch.Tensor:
    return torch.full(SHAPE, value, dtype=torch.uint8)


def test_the_first_samples_are_kept_and_no_more_than_fit() -> None:
    cache = DecodedCache(10, SHAPE, limit_bytes=4 * 192 + 100)
    for place in range(10):
        cache.put(place, sample(place))
    found = [cache.get(place) for place in range(10)]
    assert [x is not None for x in found] == [True] * 4 + [False] * 6
    assert all(torch.equal(x, sample(i)) for i, x in enumerate(found) if x is not None)
    assert cache.num_bytes == 4 * 192


def test_it_takes_no_more_than_the_shard_needs() -> None:
    assert DecodedCache(10, SHAPE, limit_bytes=1 << 40).num_bytes == 10 * 192


def test_what_was_not_put_there_is_not_found() -> None:
    cache = DecodedCache(10, SHAPE, limit_bytes=1 << 20)
    cache.put(3, sample(7))
    assert cache.get(2) is None
    assert cache.get(3) is not None


def test_with_no_room_nothing_is_kept() -> None:
    cache = DecodedCache(10, SHAPE, limit_bytes=0)
    cache.put(0, sample(1))
    assert cache.get(0) is None
