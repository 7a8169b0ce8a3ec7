"""Samples of a shard, and what becomes of those that cannot be read."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor

from fedwan.data.reader import Reader
from fedwan.errors import ConfigError
from tests.data.files import refused

SHAPE = (3, 4, 4)


class Disk:
    """Sample i is all i; some are damaged."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.decoded: list[int] = []

    def decode(self, place: int) -> Tensor:
        self.decoded.append(place)
        if place in self.bad:
            raise ConfigError(f"data.path: file {place} cannot be read as an image; remove it")
        return torch.full(SHAPE, place % 256, dtype=torch.uint8)


def reader(disk: Disk, num: int, cache_bytes: int = 0) -> Reader:
    return Reader(disk.decode, torch.arange(num), SHAPE, cache_bytes)


def test_samples_come_with_their_labels_in_the_order_asked_for() -> None:
    batch = reader(Disk(set()), 10).read([4, 9, 4])
    assert batch.y.tolist() == [4, 9, 4]
    assert batch.x[:, 0, 0, 0].tolist() == [4, 9, 4]


def test_what_is_cached_is_decoded_once() -> None:
    disk = Disk(set())
    cached = reader(disk, 10, cache_bytes=5 * 48)
    for _ in range(3):
        batch = cached.read(range(10))
        assert batch.x[:, 0, 0, 0].tolist() == batch.y.tolist() == list(range(10))
    assert sorted(disk.decoded) == sorted([*range(5), *range(5, 10), *range(5, 10), *range(5, 10)])


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_the_next_sample_stands_in_with_its_label_and_the_other_is_named_once(
    cache_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk({7, 8, 199})
    damaged = reader(disk, 200, cache_bytes)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            batch = damaged.read([6, 7, 8, 9, 199])
            assert batch.y.tolist() == [6, 9, 9, 9, 0]
            assert batch.x[:, 0, 0, 0].tolist() == [6, 9, 9, 9, 0]
    assert [record.message.split()[2] for record in caplog.records] == ["7", "8", "199"]
    assert all("the next sample stands in for it" in r.message for r in caplog.records)


def test_more_than_one_in_a_hundred_are_refused_then_and_ever_after() -> None:
    damaged = reader(Disk(set(range(100, 110))), 300)
    for _ in range(2):
        refused(
            r"file 104 cannot be read .* \(5 of this site's 300 samples",
            lambda: damaged.read(range(300)),
        )


@pytest.mark.parametrize("num", [1, 2, 3])
def test_where_all_are_damaged_nobody_waits_for_ever(num: int) -> None:
    damaged = reader(Disk(set(range(num))), num)
    for _ in range(2):
        refused("cannot be read", lambda: damaged.read([0]))


def test_threads_that_meet_the_same_damage_name_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    barrier = threading.Barrier(4)

    class SlowDisk(Disk):
        def decode(self, place: int) -> Tensor:
            if place == 5:
                barrier.wait(10)
            return super().decode(place)

    damaged = reader(SlowDisk({5}), 300)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(int(damaged.read([5]).y))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [6] * 4
    assert len(caplog.records) == 1
