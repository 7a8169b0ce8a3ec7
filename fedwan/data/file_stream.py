"""A stream of batches that are read from files, ahead of when they are wanted, by threads.

What is in a batch is decided by one `Shuffle`, in the thread of the steps; threads only fetch what
it says. So batches are the same with any number of them, and where the stream stands is where the
last batch that was taken stands in that order: what was read ahead is thrown away and read again.
Why threads, and not the processes of torchdata's StatefulDataLoader: docs/log.md.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.data.images import to_unit
from fedwan.data.reader import Reader
from fedwan.data.shuffle import Shuffle
from fedwan.workloads.base import Batch

__all__ = ["FileStream"]

_AHEAD = 2
"""Batches that are read before they are wanted."""


class _Coming(NamedTuple):
    """A batch that is being read."""

    parts: list[Future[Batch]]
    state: dict[str, Tensor]
    """Where the stream stands once it has been taken."""


class FileStream:
    """Shuffled batches of a shard of files, without end; see `fedwan.data.stream.Stream`.

    Args:
        reader: of the shard's samples; at least one.
        batch_size: samples in every batch; at least one.
        generator: CPU generator of the permutations, which nobody else draws from. It may be ahead
            of the batches that were taken; `state()` is not.
        device: where batches are wanted.
        num_threads: that read ahead; 0 reads each batch when it is asked for.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        generator: torch.Generator,
        device: torch.device | str,
        num_threads: int,
    ) -> None:
        self._reader = reader
        self._shuffle = Shuffle(len(reader), batch_size, generator)
        self._device = device
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "data") if num_threads else None
        self._coming: deque[_Coming] = deque()
        self._state = self._shuffle.state()

    def next_batch(self) -> Batch:
        """The next `batch_size` samples, x in [-1, 1], on the stream's device.

        Raises:
            ConfigError: too many samples cannot be read.
        """
        if self._threads is None:
            batch = self._reader.read(self._shuffle.next_index().tolist())
            self._state = self._shuffle.state()
        else:
            while len(self._coming) <= _AHEAD:
                self._coming.append(self._order(self._threads))
            coming = self._coming.popleft()
            parts = [part.result() for part in coming.parts]
            batch = Batch(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))
            self._state = coming.state
        return Batch(to_unit(batch.x.to(self._device)), batch.y.to(self._device))

    def _order(self, threads: ThreadPoolExecutor) -> _Coming:
        """Have the next batch read, by all threads together."""
        index = self._shuffle.next_index()
        parts = [
            threads.submit(self._reader.read, part.tolist())
            for part in index.chunk(self._num_threads)
        ]
        return _Coming(parts, self._shuffle.state())

    def state_dict(self) -> dict[str, Tensor]:
        """Where the stream stands: `generator` (uint8), `order` (int64), `position` (int64, ())."""
        return self._state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `Stream`."""
        self._forget()
        self._shuffle.load_state(state)
        self._state = self._shuffle.state()

    def close(self) -> None:
        """Wait for the threads, at most for what each is reading, and end them."""
        self._forget()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _forget(self) -> None:
        for coming in self._coming:
            for part in coming.parts:
                part.cancel()
        self._coming.clear()
