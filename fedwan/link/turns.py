"""First come, first served, for transfers of one site in one direction.

Transfers that share a link all end late: of ten that begin together, all ten arrive at the end,
while the other direction stood idle. One after the other, they carry the same bytes in the same
time, the first has arrived after a tenth of it, and what it leads to is on its way back already.

A transfer whose connection is gone, though nobody has noticed yet, does not hold up the others: one
that stands still for a while loses its place, and goes on beside the next when it can.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

__all__ = ["Line"]

RECHECK_S = 1.0
STALL_S = 10.0
"""Without a chunk for so long, a turn no longer keeps others waiting. gRPC needs up to twice as
long to find that a connection is gone; a chunk of 1 MiB takes less from 0.9 Mbit/s on."""


class Line:
    """Those who wait, in the order in which they came; any thread may stand in it.

    A turn ends when its last chunk is handed over, not when it has arrived: the next one's follow
    close behind.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, int] = OrderedDict()
        self._moved = threading.Condition()
        self._moved_at = time.monotonic()

    def enter(self, key: Hashable) -> None:
        """Stand behind the others; whoever names a key that stands there joins it."""
        with self._moved:
            if not self._places:
                self._moved_at = time.monotonic()
            self._places[key] = self._places.get(key, 0) + 1

    def wait(self, key: Hashable, is_wanted: Callable[[], bool]) -> None:
        """Return when it is first, or once it no longer wants to be.

        Args:
            key: that has entered.
            is_wanted: asked now and then.
        """
        with self._moved:
            while key in self._places and not self._is_first(key) and is_wanted():
                if time.monotonic() - self._moved_at > STALL_S:
                    self.end(next(iter(self._places)))
                else:
                    self._moved.wait(RECHECK_S)

    def _is_first(self, key: Hashable) -> bool:
        return next(iter(self._places), None) == key

    def moved(self, key: Hashable) -> None:
        """Note that a chunk was handed over."""
        with self._moved:
            if self._is_first(key):
                self._moved_at = time.monotonic()

    def leave(self, key: Hashable) -> None:
        """Undo one `enter`; the place is free after the last."""
        with self._moved:
            num = self._places.get(key, 0) - 1
            if num > 0:
                self._places[key] = num
            else:
                self.end(key)

    def end(self, key: Hashable) -> None:
        """The turn is over, for all who joined it; again, it does nothing."""
        with self._moved:
            self.moved(key)
            if self._places.pop(key, None) is not None:
                self._moved.notify_all()

    def following(self, key: Hashable, chunks: Iterable[int]) -> Iterator[int]:
        """The same chunks; the turn moves with each, and is over when there are no more."""
        for chunk in chunks:
            self.moved(key)
            yield chunk
        self.end(key)

    @contextmanager
    def turn(self) -> Iterator[Hashable]:
        """Wait for a turn, which ends with `following` or with the context; yields its key."""
        key = object()
        self.enter(key)
        try:
            self.wait(key, lambda: True)
            yield key
        finally:
            self.end(key)
