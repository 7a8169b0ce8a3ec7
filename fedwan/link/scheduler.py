"""The order in which transfers and their chunks go out.

Transfers of one site in one direction go one after the other (`TransferQueue`): side by side they
would all end late, while the other direction stands idle. The chunks of one transfer go to
whichever channel has room (`ChunkQueue`): with fixed shares the slowest channel would decide.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

RECHECK_S = 1.0
STALL_S = 10.0
"""Without a chunk for so long, a transfer no longer keeps others waiting. gRPC needs up to twice as
long to find that a connection is gone; a chunk of 1 MiB takes less from 0.9 Mbit/s on."""
MAX_QUEUES = 1024
"""Chunk queues remembered: those in use, and some that are empty."""


class ChunkQueue(Iterator[int]):
    """Gives each chunk once, in order, to any thread that asks."""

    def __init__(self, chunks: Iterable[int]) -> None:
        self._rest = iter(chunks)
        self._lock = threading.Lock()
        self.is_empty = False
        """Whether somebody asked in vain."""

    def __next__(self) -> int:
        with self._lock:
            for chunk in self._rest:
                return chunk
            self.is_empty = True
            raise StopIteration


class SharedQueues:
    """Chunk queues of downloads that arrive as several calls, by site and the transfer's number.

    An empty one is remembered for a while: a call that comes late has nothing left to do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: OrderedDict[tuple[str, int], ChunkQueue] = OrderedDict()

    def join(self, site: str, transfer: int, chunks: Iterable[int]) -> ChunkQueue:
        """The queue of a transfer; of these chunks, if this is its first call."""
        with self._lock:
            queue = self._queues.setdefault((site, transfer), ChunkQueue(chunks))
            self._queues.move_to_end((site, transfer))
            while len(self._queues) > MAX_QUEUES:
                self._queues.popitem(last=False)
            return queue


class TransferQueue:
    """First come, first served; any thread may wait in it.

    A transfer leaves the queue when its last chunk is handed over, not when it has arrived: the
    next one's chunks follow close behind. One that stalls, as after a broken connection, loses its
    place and goes on beside the next.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()

    def enter(self, key: Hashable) -> None:
        """Wait behind the others; a key that waits already is joined."""
        with self._changed:
            if not self._waiting:
                self._progress_at = time.monotonic()
            self._waiting[key] = self._waiting.get(key, 0) + 1

    def wait(self, key: Hashable, is_wanted: Callable[[], bool]) -> None:
        """Return when this key is first, or no longer wanted, which is asked now and then."""
        with self._changed:
            while key in self._waiting and not self._is_first(key) and is_wanted():
                if time.monotonic() - self._progress_at > STALL_S:
                    self.end(next(iter(self._waiting)))
                else:
                    self._changed.wait(RECHECK_S)

    def _is_first(self, key: Hashable) -> bool:
        return next(iter(self._waiting), None) == key

    def progressed(self, key: Hashable) -> None:
        """Note that a chunk was handed over."""
        with self._changed:
            if self._is_first(key):
                self._progress_at = time.monotonic()

    def leave(self, key: Hashable) -> None:
        """Undo one `enter`; the key is gone after the last."""
        with self._changed:
            if self._waiting.get(key, 0) > 1:
                self._waiting[key] -= 1
            else:
                self.end(key)

    def end(self, key: Hashable) -> None:
        """Let the next one begin; harmless if repeated."""
        with self._changed:
            self.progressed(key)
            if self._waiting.pop(key, None) is not None:
                self._changed.notify_all()

    def following(self, key: Hashable, chunks: Iterable[int]) -> Iterator[int]:
        """The same chunks, each noted as progress; the transfer ends after the last."""
        for chunk in chunks:
            self.progressed(key)
            yield chunk
        self.end(key)

    @contextmanager
    def first(self) -> Iterator[Hashable]:
        """Wait until first, which ends with `following` or with the context; yields the key."""
        key = object()
        self.enter(key)
        try:
            self.wait(key, lambda: True)
            yield key
        finally:
            self.end(key)
