"""Asking for an update before the contribution that it is made of has left.

The coordinator holds the question until the update is there, and the answer then takes half a round
trip instead of one and a half. Costs a thread, and a call that waits at the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from fedwan.site.beside import beside_steps
from fedwan.site.courier import Arrival, Courier

__all__ = ["Asked", "Asker"]

POLL_S = 0.2
"""How often a site that waits for an update heeds the coordinator's signals."""


class _InVain(Exception):  # noqa: N818
    """Nobody wants the answer any more."""


class Asked:
    """A question that was put.

    Args:
        outcome: of it.
        is_vain: set when the answer is of no use any more.
    """

    def __init__(self, outcome: Future[Arrival], is_vain: threading.Event) -> None:
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

    def wait(self, heed: Callable[[], None]) -> Arrival:
        """The answer.

        Args:
            heed: called every now and then in this thread; may raise to end the wait.

        Raises:
            FedwanError: see `Courier.fetch_update`.
        """
        try:
            while not wait([self._outcome], POLL_S).done:
                heed()
            return self._outcome.result()
        except BaseException:
            self.give_up()
            raise


class Asker:
    """Puts questions, each in a thread of its own.

    Args:
        courier: who carries them.
        count: questions at once.
    """

    def __init__(self, courier: Courier, count: int) -> None:
        self._courier = courier
        self._threads = beside_steps(count, "update")
        self._is_closed = threading.Event()

    def ask(self, fragment: int, version: int) -> Asked:
        """Ask for the update of a fragment that leads to a version."""
        is_vain = threading.Event()

        def between() -> None:
            if is_vain.is_set() or self._is_closed.is_set():
                raise _InVain

        fetch = self._courier.fetch_update
        return Asked(self._threads.submit(fetch, fragment, version, between), is_vain)

    def close(self) -> None:
        """Threads end when their present call does."""
        self._is_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
