"""The lock on what calls and the round loop share, under which nothing is written to a file."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

Event = Callable[..., None]
"""(event, site or None, text), and details by name."""


class TellingLock:
    """A condition; what is told while it is held is written once it is let go, in order.

    What is told without it is written when `tell` returns, after all that was told before. Who
    writes keeps others that write waiting, and nobody else.
    """

    def __init__(self, write: Event) -> None:
        self._held = threading.Condition()
        self.wait, self.wait_for = self._held.wait, self._held.wait_for
        self.notify_all = self._held.notify_all
        self._write = write
        self._writing = threading.Lock()
        self._told: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()
        if self._told and not self._is_mine():
            with self._writing:
                self._write_told()

    def tell(self, event: str, site: str | None, text: str, **details: Any) -> None:
        """Write an event, or have it written."""
        write = partial(self._write, event, site, text, **details)
        if self._is_mine():
            self._told.append(write)
            return
        with self._writing:
            self._write_told()
            write()

    def _write_told(self) -> None:
        while self._told:
            self._told.popleft()()

    def _is_mine(self) -> bool:
        return bool(self._held._is_owned())  # type: ignore[attr-defined]
