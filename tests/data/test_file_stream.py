"""Streams of files: the same batches with any number of threads, and after any interruption."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedwan.config import DataConfig
from fedwan.data import FileShard
from fedwan.data.file_stream import FileStream
from fedwan.data.reader import Reader
from fedwan.data.stream import BatchStream
from fedwan.errors import CheckpointError, ConfigError
from fedwan.workloads.base import Batch
from tests.data.files import open_one, stream_of, take, write_folder, write_shards

NUM = 23


def drawn(num_threads: int, decode: object = None, seed: int = 0, batch: int = 5) -> FileStream:
    """Of samples that are their own number."""

    def number(place: int) -> Tensor:
        time.sleep(0.0005 * (place % 3))  # threads overtake each other
        return torch.full((1, 2, 2), place, dtype=torch.uint8)

    reader = Reader(decode or number, torch.arange(NUM), (1, 2, 2), 0)  # type: ignore[arg-type]
    return FileStream(reader, batch, torch.Generator().manual_seed(seed), "cpu", num_threads)


@pytest.mark.parametrize("num_threads", [0, 1, 2, 7])
def test_batches_are_those_of_a_shard_in_memory_whatever_the_number_of_threads(
    num_threads: int,
) -> None:
    data = Batch(torch.arange(NUM).float() * (2 / 255) - 1, torch.arange(NUM))
    expected = BatchStream(data, 5, torch.Generator().manual_seed(0))
    stream = drawn(num_threads)
    for _ in range(12):
        batch, wanted = stream.next_batch(), expected.next_batch()
        assert batch.y.tolist() == wanted.y.tolist()
        assert batch.x[:, 0, 0, 0].tolist() == wanted.x.tolist()
        assert all(torch.equal(stream.state()[k], v) for k, v in expected.state().items())
    stream.close()


@pytest.mark.parametrize("before", [0, 1, 3, 4, 9])
@pytest.mark.parametrize(("num_threads", "later"), [(2, 2), (0, 3), (3, 0)])
def test_it_resumes_where_batches_were_taken_and_not_where_they_were_read(
    before: int, num_threads: int, later: int
) -> None:
    first = drawn(num_threads)
    take(first, before)
    state = {name: value.clone() for name, value in first.state().items()}
    rest = take(first, 8)
    first.close()
    second = drawn(later, seed=99)
    take(second, 2)  # it had read ahead, of another order
    second.load_state(state)
    assert take(second, 8) == rest
    second.close()


@pytest.mark.parametrize("name", ["folder", "webdataset"])
def test_files_give_the_same_bits_with_threads_and_without_cached_and_not(
    tmp_path: Path, name: str
) -> None:
    (write_folder if name == "folder" else write_shards)(tmp_path, range(40))
    seen = []
    for workers, cache_mb in ((0, 0), (2, 0), (2, 1), (5, 1)):
        config = DataConfig(name, path=str(tmp_path), size=24, workers=workers, cache_mb=cache_mb)
        stream = stream_of(open_one(config))
        seen.append(take(stream, 12))
        stream.close()
    assert all(batches == seen[0] for batches in seen)


def test_decoded_images_stay_below_the_limit(tmp_path: Path) -> None:
    write_folder(tmp_path, range(60), side=160)
    config = DataConfig("folder", path=str(tmp_path), size=160, cache_mb=1)
    one = open_one(config)
    assert isinstance(one, FileShard)
    stream = one.batches(8, torch.Generator().manual_seed(0))
    take(stream, 20)
    cache = stream._reader._cache
    assert cache.num_bytes <= 1 << 20 < 48 * 3 * 160 * 160
    assert cache._samples.untyped_storage().nbytes() == cache.num_bytes
    kept = [place for place in range(len(one.index)) if cache.get(place) is not None]
    assert kept == list(range(13))
    stream.close()


def test_no_more_than_two_batches_are_read_ahead() -> None:
    lock, read = threading.Lock(), []

    def count(place: int) -> Tensor:
        with lock:
            read.append(place)
        return torch.zeros(1, 2, 2, dtype=torch.uint8)

    stream = drawn(2, count)
    take(stream, 1)
    time.sleep(0.2)
    assert len(read) == 15
    stream.close()


def test_batches_come_while_the_step_computes() -> None:
    started = threading.Event()

    def slow(place: int) -> Tensor:
        started.set()
        return torch.zeros(1, 2, 2, dtype=torch.uint8)

    stream = drawn(1, slow)
    stream.next_batch()
    started.clear()
    stream.next_batch()
    assert started.wait(10)  # that after the next, though nobody asks for it
    stream.close()


def test_what_a_thread_cannot_read_is_told_to_the_step() -> None:
    def broken(place: int) -> Tensor:
        raise ConfigError(f"data.path: file {place} cannot be read")

    stream = drawn(2, broken)
    with pytest.raises(ConfigError, match="cannot be read"):
        take(stream, 5)
    stream.close()


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    stream = drawn(3)
    take(stream, 2)
    assert threading.active_count() > before
    stream.close()
    assert threading.active_count() == before


def test_the_state_of_another_shard_is_refused() -> None:
    stream, other = drawn(0), drawn(2)
    take(stream, 1)
    state = stream.state() | {"order": torch.arange(NUM + 1)}
    with pytest.raises(CheckpointError, match=f"but this shard has {NUM}"):
        other.load_state(state)
    other.close()
