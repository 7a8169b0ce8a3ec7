"""Tests of several processes in one room: any number together, or one that is alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["turn"]


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for a place in the room; with `alone`, until everybody else has left it.

    Everybody comes in through one door, and who waits to be alone stands in it: otherwise two that
    take turns in the room might never leave it empty.

    Args:
        folder: of the run's two lock files.
        alone: whether nobody else may be there meanwhile.
    """
    with (folder / "door.lock").open("a") as door, (folder / "room.lock").open("a") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # In so many words: a process that the test has left behind may hold the file open.
            fcntl.flock(room, fcntl.LOCK_UN)
