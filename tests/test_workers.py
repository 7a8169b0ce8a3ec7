"""Who waits for whom, though each of them is a process of its own in a real run."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from tests.planes import eventually
from tests.workers import Room, scope_of


class Worker:
    """Enters a room and stays there until told to go."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self.is_in = threading.Event()
        self.may_go = threading.Event()
        self._room = Room(folder)
        self.thread = threading.Thread(target=self._stay, args=(alone,), daemon=True)
        self.thread.start()

    def _stay(self, alone: bool) -> None:
        self._room.enter(alone=alone)
        self.is_in.set()
        self.may_go.wait()
        self._room.leave()


def is_shut(folder: Path) -> bool:
    """Whether somebody stands in the door."""
    with (folder / "door.lock").open("a") as door:
        try:
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_is_alone_comes_in_between_those_before_and_those_after(tmp_path: Path) -> None:
    before = [Worker(tmp_path, alone=False) for _ in range(2)]
    assert all(worker.is_in.wait(5.0) for worker in before)
    alone = Worker(tmp_path, alone=True)
    eventually(lambda: is_shut(tmp_path))
    before[0].may_go.set()
    after = Worker(tmp_path, alone=False)
    assert not alone.is_in.wait(0.1) and not after.is_in.is_set(), "it would never be alone"
    before[1].may_go.set()
    assert alone.is_in.wait(5.0) and not after.is_in.wait(0.1)
    alone.may_go.set()
    assert after.is_in.wait(5.0)
    after.may_go.set()
    eventually(lambda: not after.thread.is_alive())


def test_who_is_alone_may_stay_for_what_comes_next(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.enter(alone=True)
    room.enter(alone=True)
    room.leave()
    other = Worker(tmp_path, alone=False)
    assert other.is_in.wait(5.0)
    other.may_go.set()


def test_files_of_one_row_have_one_scope_and_other_tests_one_each() -> None:
    assert scope_of("tests/benchmarks/test_wan.py::test_a") == scope_of(
        "tests/benchmarks/test_transport.py::test_b"
    )
    assert scope_of("tests/test_app.py::test_a[x]") != scope_of("tests/test_app.py::test_a[y]")
