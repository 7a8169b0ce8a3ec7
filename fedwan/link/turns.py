"""First come, first served, for transfers of one site in one direction.

Transfers that share a link all end late: of ten that begin together, all ten arrive at the end,
while the other direction stood idle. One after the other, they carry the same bytes in the same
time, the first has arrived after a tenth of it, and what it leads to is on its way back already.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

__all__ = ["Line"]

RECHECK_S = 1.0


class Line:
    """Those who wait, in the order in which they came; any thread may stand in it.

    A turn ends when its last chunk is handed over, not when it has arrived: the next one's follow
    close behind.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, int] = OrderedDict()
        self._moved = threading.Condition()

    def enter(self, key: Hashable) -> None:
        """Stand behind the others; whoever names a key that stands there joins it."""
        with self._moved:
            self._places[key] = self._places.get(key, 0) + 1

    def wait(self, key: Hashable, is_wanted: Callable[[], bool]) -> None:
        """Return when it is first, or once it no longer wants to be; looks at that now and then."""
        with self._moved:
            while key in self._places and next(iter(self._places)) != key and is_wanted():
                self._moved.wait(RECHECK_S)

    def leave(self, key: Hashable) -> None:
        """Undo one `enter`; the place is free after the last."""
        with self._moved:
            num = self._places.get(key, 0) - 1
            if num > 0:
                self._places[key] = num
                return
        self.end(key)

    def end(self, key: Hashable) -> None:
        """The turn is over, for all who joined it; again, it does nothing."""
        with self._moved:
            if self._places.pop(key, None) is not None:
                self._moved.notify_all()

    @contextmanager
    def turn(self) -> Iterator[Callable[[], None]]:
        """Wait for a turn; what is yielded ends it, and so does leaving."""
        key = object()
        self.enter(key)
        try:
            self.wait(key, lambda: True)
            yield lambda: self.end(key)
        finally:
            self.end(key)
