"""How workers of pytest-xdist share the suite and the machine."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

__all__ = ["Room", "scope_of"]

_TOGETHER = {
    # Those that measure the machine wait for the others once, not each time.
    "tests/benchmarks/test_codecs.py": "measurements",
    # One makes leftovers that any other star would sweep up.
    "tests/benchmarks/test_wan.py": "measurements",
    "tests/benchmarks/test_transport.py": "measurements",
    # The undisturbed runs are made once.
    "tests/test_end_to_end.py": "end to end",
    # The classifier is trained once, the photographs are cut up once.
    "tests/metrics/test_classifier.py": "classifier",
    "tests/data/test_photo_edges.py": "photographs",
}
"""Files whose tests one worker runs in a row, by name of the row; long rows come first."""


def scope_of(nodeid: str) -> str:
    """What one worker runs in a row: tests of one name."""
    return _TOGETHER.get(nodeid.partition("::")[0], nodeid)


class Room:
    """Where tests run: those of any number of workers, or of one that is alone.

    Everybody comes in through one door, and who waits to be alone stands in it: otherwise two that
    take turns in the room might never leave it empty.

    Args:
        folder: of the run's two lock files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

    def enter(self, *, alone: bool) -> None:
        """Wait for a place, with `alone` until everybody else has left; nothing if we are there."""
        if self._file is not None:
            return
        with (self._folder / "door.lock").open("a") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            self._file = (self._folder / "room.lock").open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)

    def leave(self) -> None:
        """Make room."""
        assert self._file is not None
        # In so many words: a process that the test has left behind may hold the file open.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
        self._file = None
