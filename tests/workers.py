"""How workers of pytest-xdist share the suite and the machine."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["scope_of", "turn"]

_TOGETHER = {
    # The undisturbed runs are made once.
    "tests/test_end_to_end.py": "end to end",
    # One makes leftovers that any other star would sweep up.
    "tests/benchmarks/test_wan.py": "namespaces",
    "tests/benchmarks/test_transport.py": "namespaces",
    # The classifier is trained once, the photographs are cut up once.
    "tests/metrics/test_classifier.py": "classifier",
    "tests/data/test_photo_edges.py": "photographs",
}
"""Files whose tests one worker runs in a row, by name of the row."""


def scope_of(nodeid: str) -> str:
    """What one worker runs in a row: tests of one name."""
    return _TOGETHER.get(nodeid.partition("::")[0], nodeid)


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
