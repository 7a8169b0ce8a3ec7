"""Asking for an update before the contribution that it is made of has left.

The coordinator holds the question until the update is there, and the answer then takes half a round
trip instead of one and a half. Costs a thread, and a call that waits at the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from fedwan.site.beside import beside_steps
from fedwan.site.stub import Arrival, CoordinatorStub

__all__ = ["Asked", "Asker"]

POLL_S = 0.2
"""How often a site that waits for an update heeds the coordinator's signals."""


class _InVain(Exception):  # noqa: N818
    """Nobody wants the answer any more."""


class Asked:
    """A question that was put."""

    def __init__(self, outcome: Future[Arrival] | None, is_vain: threading.Event) -> None:
        self._outcome = outcome
        self._is_vain = is_vain

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What was to be sent could not be: nobody will wait for the answer."""
        if kind is not None:
            self.give_up()

    def give_up(self) -> None:
        """Let the question end by itself, within a poll."""
        self._is_vain.set()

    def poll(self) -> bool:
        """Whether the answer is here; waits for it a little."""
        assert self._outcome is not None, "rank 0 has asked"
        return bool(wait([self._outcome], POLL_S).done)

    def result(self) -> Arrival:
        """The answer, once it is here."""
        assert self._outcome is not None, "rank 0 has asked"
        return self._outcome.result()

    def wait(self, heed: Callable[[], None]) -> Arrival:
        """The answer."""
        try:
            while not self.poll():
                heed()
            return self.result()
        except BaseException:
            self.give_up()
            raise


class Asker:
    """Puts questions, each in a thread of its own."""

    def __init__(self, stub: CoordinatorStub, count: int) -> None:
        self._stub = stub
        self._threads = beside_steps(count, "update")
        self._is_closed = threading.Event()

    def ask(self, fragment: int, version: int, is_leader: bool = True) -> Asked:
        """Ask for the update of a fragment that leads to a version; at rank 0 alone."""
        is_vain = threading.Event()
        if not is_leader:
            return Asked(None, is_vain)

        def between() -> None:
            if is_vain.is_set() or self._is_closed.is_set():
                raise _InVain

        fetch = self._stub.fetch_update
        return Asked(self._threads.submit(fetch, fragment, version, between), is_vain)

    def close(self) -> None:
        """Threads end when their present call does."""
        self._is_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
