"""One direction of a site's link in virtual time: first come, first served.

Transfers of one direction go one after the other (`fedwan.link.scheduler`), so that a line needs no
events of its own: when it is free says all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from fedwan.planner.wire_model import Pipe

__all__ = ["Line"]


class Line:
    """One direction of a site's link: first come, first served."""

    __slots__ = ("_pipes", "_starts", "free_at_s")

    def __init__(self, seasons: Sequence[tuple[float, Pipe]]) -> None:
        self._starts = [start for start, _ in seasons]
        self._pipes = [pipe for _, pipe in seasons]
        self.free_at_s = -math.inf

    def pipe_at(self, moment_s: float) -> Pipe:
        """The link as it is then."""
        if len(self._pipes) == 1:
            return self._pipes[0]
        return self._pipes[max(0, bisect_right(self._starts, moment_s) - 1)]

    def carry(self, num_bytes: float, from_s: float) -> float:
        """When the last byte has arrived, of bytes that are there at a time to be sent."""
        free_at_s = self.free_at_s
        begins_s = from_s if from_s > free_at_s else free_at_s
        idle_s = begins_s - free_at_s
        if len(self._pipes) == 1:
            pipe = self._pipes[0]
            ends_s = begins_s + pipe.transfer_s(num_bytes, idle_s)
        else:
            pipe, ends_s = self._carry_through(num_bytes, begins_s, idle_s)
        self.free_at_s = ends_s
        return ends_s + pipe.rtt_s / 2

    def _carry_through(
        self, num_bytes: float, begins_s: float, idle_s: float
    ) -> tuple[Pipe, float]:
        """The link at the end, and when that is, whatever changes meanwhile."""
        starts = self._starts
        index = max(0, bisect_right(starts, begins_s) - 1)
        ends_s = begins_s + self._pipes[index].transfer_s(num_bytes, idle_s)
        while index + 1 < len(starts) and starts[index + 1] < ends_s:
            # What is left goes on at the new rate, without a pause.
            index += 1
            num_bytes *= (ends_s - starts[index]) / (ends_s - begins_s)
            begins_s = starts[index]
            ends_s = begins_s + self._pipes[index].transfer_s(num_bytes, 0.0)
        return self._pipes[index], ends_s
