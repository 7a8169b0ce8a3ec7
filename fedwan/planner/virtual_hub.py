"""The coordinator in virtual time, where sites keep the schedule: rounds in its order."""

from __future__ import annotations

from collections.abc import Sequence

from fedwan.planner.clock import Clock
from fedwan.planner.course import Course
from fedwan.planner.virtual_journey import Journey
from fedwan.planner.virtual_rounds import Gathered, RoundLoop
from fedwan.planner.virtual_site import Timetable
from fedwan.strategy import Strategy

__all__ = ["Coordinator"]


class Coordinator(RoundLoop):
    """Implements `fedwan.planner.virtual_journey.ScheduleHub`; see `RoundLoop`."""

    def __init__(
        self, strategy: Strategy, table: Timetable, num_sites: int, clock: Clock, course: Course
    ) -> None:
        super().__init__(strategy, table, num_sites, clock, course)
        self._num_rounds = len(table.departures)
        self._sites: Sequence[Journey] = ()
        self._rounds: dict[int, Gathered] = {}
        self._latecomers: list[Journey] = []  # who came while the present round was closing
        self._num_late = [0] * len(self._loads)  # to be merged into the next version
        self._updates = [0] * len(self._loads)  # the version that is out, by fragment

    def open(self, sites: Sequence[Journey]) -> None:
        """The sites are there."""
        self._sites = sites
        self.begin()

    def arrive(self, site: Journey, round_index: int, epoch: int) -> None:
        """See `ScheduleHub`."""
        if epoch != site.epoch:
            return  # it failed before this was whole
        if round_index < self._current or (
            round_index == self._current and not self._is_collecting
        ):
            self._arrive_late(site, round_index)
            return
        found = self._round(round_index)
        found.add(site.index)
        if round_index == self._current:
            found.last_s = self._clock.now_s - self._began_s
            self._merge_ahead(found)
            self._consider()

    def _arrive_late(self, site: Journey, round_index: int) -> None:
        """Its round is over: it gets the update if it can, and starts over if not."""
        fragment, version = round_index % len(self._loads), round_index // len(self._loads)
        if round_index == self._current:
            if self._rounds[round_index].arrived[site.index]:
                return  # an earlier process of this site had sent it already
            self._latecomers.append(site)
            self._take_late(fragment, 1)
            return
        # Where the round of the present version is closing, it will be in the one after that.
        present = self.versions[fragment]
        is_closing = not self._is_collecting and self._fragment == fragment
        self._take_late(fragment, present + is_closing - version)
        if self._updates[fragment] == version + 1:
            site.deliver(round_index)
        else:
            site.start_over()

    def _take_late(self, fragment: int, staleness: int) -> None:
        """Keep it for the next version, or drop it."""
        if staleness <= self._policy.max_staleness:
            self._num_late[fragment] += 1
        else:
            self._course.dropped += 1

    def _round(self, index: int) -> Gathered:
        found = self._rounds.get(index)
        if found is None:
            found = self._rounds[index] = Gathered(self._num_sites)
        return found

    def _merge_ahead(self, found: Gathered) -> None:
        count = found.merge_ahead()
        found.merged += count
        self._merge(count)

    def _is_over(self) -> bool:
        """Sites end by themselves, with the last update."""
        return self._current >= self._num_rounds

    def _open(self) -> None:
        """See `RoundLoop`."""
        self._merge_ahead(self._round(self._current))

    def _num_arrived(self) -> int:
        """See `RoundLoop`."""
        return self._rounds[self._current].count

    def _close(self) -> int:
        """See `RoundLoop`."""
        found, fragment = self._rounds[self._current], self._fragment
        num_late, self._num_late[fragment] = self._num_late[fragment], 0
        self._merge(found.count - found.merged + num_late)
        self._past_s[fragment].append(found.last_s)
        self._updates[fragment] = 0
        self._course.contributions += found.count + num_late
        self._course.late += num_late
        return found.count

    def _publish(self) -> None:
        """See `RoundLoop`."""
        index, fragment = self._current, self._fragment
        arrived = self._rounds.pop(index).arrived
        self._updates[fragment] = self.versions[fragment]
        for site in self._sites:
            if arrived[site.index]:
                site.deliver(index)
        for site in self._latecomers:
            site.deliver(index)
        self._latecomers.clear()
