"""The coordinator's round loop in virtual time: when it asks the policy, what its work takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from fedwan.coordinator.run import TICK_S
from fedwan.planner.clock import Clock
from fedwan.planner.course import Course, RoundNote
from fedwan.planner.loads import Load
from fedwan.planner.virtual_site import Timetable
from fedwan.protocol.rounds import PAST_ROUNDS
from fedwan.strategy import Strategy

__all__ = ["Gathered", "RoundLoop"]


class Gathered:
    """Whose contributions have come for a version of a fragment.

    Args:
        num_sites: of the run.
    """

    __slots__ = ("_next_site", "arrived", "count", "last_s", "merged")

    def __init__(self, num_sites: int) -> None:
        self.arrived = bytearray(num_sites)
        self.count = 0
        self.merged = 0
        self.last_s = 0.0
        """When the last one came that was in time."""
        self._next_site = 0  # all before it are merged

    def add(self, site: int) -> None:
        """A site's contribution is here."""
        if not self.arrived[site]:
            self.arrived[site] = 1
            self.count += 1

    def merge_ahead(self) -> int:
        """How many can be merged: only sites whose predecessors are all merged, in site order."""
        before = self._next_site
        while self._next_site < len(self.arrived) and self.arrived[self._next_site]:
            self._next_site += 1
        return self._next_site - before


class RoundLoop(ABC):
    """One thread that takes rounds one after the other, as the real round loop.

    Args:
        strategy: the recipe.
        table: of the run.
        num_sites: of the run.
        clock: virtual time.
        course: is filled in.
    """

    def __init__(
        self, strategy: Strategy, table: Timetable, num_sites: int, clock: Clock, course: Course
    ) -> None:
        self.versions = [0] * len(table.loads)
        """See `fedwan.planner.virtual_site.Hub`."""
        self.num_live = num_sites
        """See `fedwan.planner.virtual_site.Hub`."""
        self._policy = strategy.policy
        self._loads: Sequence[Load] = table.loads
        self._num_sites = num_sites
        self._clock = clock
        self._course = course
        self._current = 0
        self._is_collecting = False
        self._began_s = 0.0
        self._free_at_s = 0.0  # when all merging so far is done
        self._past_s = [deque[float](maxlen=PAST_ROUNDS) for _ in self._loads]

    @property
    def _fragment(self) -> int:
        """Of the present round."""
        return self._current % len(self._loads)

    @property
    def _version(self) -> int:
        """That the present round starts from."""
        return self._current // len(self._loads)

    def begin(self, index: int = 0) -> None:
        """Turn to a round."""
        self._current = index
        if self._is_over():
            return
        self._is_collecting = True
        self._began_s = self._clock.now_s
        self._open()
        self._consider()
        if self._is_collecting:
            self._clock.at(self._began_s + TICK_S, self._tick, index)

    def _tick(self, index: int) -> None:
        if index == self._current and self._is_collecting:
            self._consider()
            if self._is_collecting:
                self._clock.at(self._clock.now_s + TICK_S, self._tick, index)

    def _consider(self) -> None:
        """Ask the policy, and do what it says."""
        now_s, num_arrived = self._clock.now_s, self._num_arrived()
        elapsed_s, past_s = now_s - self._began_s, self._past_s[self._fragment]
        verdict = self._policy.decide(num_arrived, elapsed_s, past_s, self._version, self.num_live)
        if verdict == "wait":
            return
        self._is_collecting = False
        if verdict == "stop":
            self._course.stopped = (
                f"round {self._version + 1} had {num_arrived} of "
                f"{self._num_sites} contributions after {elapsed_s:g} s"
            )
            self._clock.stop()
            return
        merged = self._close()
        self._course.rounds.append(
            RoundNote(self._fragment, self._version + 1, self._began_s, now_s, merged)
        )
        commit_s = self._loads[self._fragment].commit_s
        self._course.busy_s += commit_s
        self._clock.at(self._free_at_s + commit_s, self._commit)

    def _commit(self) -> None:
        index = self._current
        self.versions[self._fragment] += 1
        self._publish()
        self.begin(index + 1)

    def _merge(self, count: int) -> None:
        """Merging takes its time, one after the other."""
        spent_s = count * self._loads[self._fragment].merge_s
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + spent_s
        self._course.busy_s += spent_s

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether there is no round any more."""

    @abstractmethod
    def _open(self) -> None:
        """The coordinator turns to the present round."""

    @abstractmethod
    def _num_arrived(self) -> int:
        """Sites whose contribution to the present round is here."""

    @abstractmethod
    def _close(self) -> int:
        """Merge what is not merged yet; how many were in time."""

    @abstractmethod
    def _publish(self) -> None:
        """Hand the update of the present round out."""
