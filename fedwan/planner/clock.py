"""Virtual time: what is to happen, in order; as much passes as the next event says."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Clock"]


class Clock:
    """Calls functions at their times; those of the same time in the order in which they came."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._is_stopped = False

    def at(self, moment_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have something called at a time, which is not before now."""
        self._num_events += 1
        heapq.heappush(self._heap, (moment_s, self._num_events, call, args))

    def stop(self) -> None:
        """Let nothing happen any more."""
        self._is_stopped = True

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap and not self._is_stopped:
            self.now_s, _, call, args = heapq.heappop(heap)
            call(*args)
