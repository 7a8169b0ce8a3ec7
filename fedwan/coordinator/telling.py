"""The lock on what calls and the round loop share, under which nothing is written to a file."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

Event = Callable[..., None]
"""(event, site or None, text), and details by name."""

_log = logging.getLogger(__name__)


class TellingLock:
    """A condition; what is told while it is held is written once it is let go, in order.

    What is told without it is written when `tell` returns, after all that was told before. Who
    writes keeps others that tell without it waiting, and nobody else. What a full disk refuses
    stays for the next try.
    """

    def __init__(self, write: Event) -> None:
        self._held = threading.Condition()
        self.wait, self.wait_for = self._held.wait, self._held.wait_for
        self.notify_all = self._held.notify_all
        self._write = write
        self._writing = threading.Lock()
        self._told: deque[Callable[[], None]] = deque()
        self._is_failing = False

    def __enter__(self) -> None:
        self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()
        if not self._is_mine():
            self._write_if_free()

    def tell(self, event: str, site: str | None, text: str, **details: Any) -> None:
        """Write an event, or have it written; an `OSError` where it, or one before, cannot be."""
        write = partial(self._write, event, site, text, **details)
        if self._is_mine():
            self._told.append(write)
            return
        with self._writing:
            self._write_told()
            write()
        self._write_if_free()

    def flush(self) -> None:
        """Until all that was told is written; an `OSError` where it cannot be."""
        with self._writing:
            self._write_told()

    def _write_if_free(self) -> None:
        """Who writes now writes what others have told meanwhile, too, once more after letting go.

        Who happened to let go of the lock has no part in what was told: errors are logged.
        """
        while self._told and self._writing.acquire(blocking=False):
            try:
                self._write_told()
            except OSError as error:
                if not self._is_failing:
                    _log.warning("the journal cannot be written, and is tried again: %s", error)
                self._is_failing = True
                return
            finally:
                self._writing.release()

    def _write_told(self) -> None:
        """By who has `_writing`."""
        while self._told:
            write = self._told.popleft()
            try:
                write()
            except OSError:
                self._told.appendleft(write)
                raise
        self._is_failing = False

    def _is_mine(self) -> bool:
        return bool(self._held._is_owned())  # type: ignore[attr-defined]
