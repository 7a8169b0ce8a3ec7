"""The coordinator in virtual time, where sites keep a pace of their own.

Rounds of one contribution, the first to come, or of all sites, as the policy says. The run ends
with the steps of all sites together. How many steps a site takes is `Paces`' to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fedwan.link import wire_pb2 as wire
from fedwan.planner.clock import Clock
from fedwan.planner.course import Course
from fedwan.planner.virtual_own_pace import Answer, OwnPaceJourney
from fedwan.planner.virtual_rounds import Gathered, RoundLoop
from fedwan.planner.virtual_site import Timetable
from fedwan.protocol.policy import Paces
from fedwan.strategy import Strategy

__all__ = ["OwnPaceCoordinator"]


class OwnPaceCoordinator(RoundLoop):
    """Implements `fedwan.planner.virtual_own_pace.OwnPaceHub`; see `RoundLoop`."""

    def __init__(
        self, strategy: Strategy, table: Timetable, num_sites: int, clock: Clock, course: Course
    ) -> None:
        super().__init__(strategy, table, num_sites, clock, course)
        (load,) = table.loads
        self._table = table
        # As in `fedwan.coordinator.updates`: past updates stay out up to the weights' own size.
        keeps = strategy.policy.arrivals_from is not None
        self._num_kept = max(1, table.global_bytes // load.down_bytes) if keeps else 1
        self._paces = Paces(table.h, strategy.least_steps)
        self._steps = {str(n): table.h for n in range(num_sites)}
        self._steps_merged = 0
        self._sites: Sequence[OwnPaceJourney] = ()
        self._gathered = Gathered(num_sites)
        self._queue: deque[tuple[OwnPaceJourney, int]] = deque()  # with the version it started from
        self._merging: list[OwnPaceJourney] = []
        self._merged_into = [0] * num_sites
        self._waiting: list[tuple[OwnPaceJourney, int]] = []  # with its epoch

    def open(self, sites: Sequence[OwnPaceJourney]) -> None:
        """The sites are there."""
        self._sites = sites
        self.begin()

    # What sites do --------------------------------------------------------------------------

    def arrive(self, site: OwnPaceJourney, version: int, epoch: int) -> None:
        """See `OwnPaceHub`."""
        if epoch != site.epoch:
            return  # it failed before this was whole
        is_late = version < self._current or not self._is_collecting
        if self._is_on_arrival or is_late:
            if self._current + (not self._is_collecting) - version > self._policy.max_staleness:
                self._drop(site)
                return
            self._queue.append((site, version))
            if self._is_on_arrival and self._is_collecting:
                self._consider()
            return
        found = self._gathered
        found.add(site.index)
        found.last_s = self._clock.now_s - self._began_s
        self._merge_ahead()
        self._consider()

    def want(self, site: OwnPaceJourney, epoch: int) -> None:
        """See `OwnPaceHub`."""
        if epoch != site.epoch:
            return
        if self._is_over():
            site.end()
        elif site.version < self.versions[0]:
            self._answer(site)
        else:
            self._waiting.append((site, epoch))

    def _answer(self, site: OwnPaceJourney) -> None:
        into, present = self._merged_into[site.index], self.versions[0]
        is_held = present - site.version <= self._num_kept
        version = site.version + 1 if is_held else present
        num_bytes = self._loads[0].down_bytes if is_held else self._table.global_bytes
        steps = self._steps.get(str(site.index), self._table.h)
        site.tell(Answer(version, num_bytes, site.sent_from < into <= version, steps))

    def _drop(self, site: OwnPaceJourney) -> None:
        self._course.dropped += 1
        site.start_over()

    # Rounds ---------------------------------------------------------------------------------

    @property
    def _is_on_arrival(self) -> bool:
        return self._policy.is_on_arrival(self._current)

    def _is_over(self) -> bool:
        """See `RoundLoop`."""
        table = self._table
        return self._steps_merged >= table.num_steps // table.h * table.h * self._num_sites

    def _open(self) -> None:
        """See `RoundLoop`."""
        self._gathered = Gathered(self._num_sites)

    def _num_arrived(self) -> int:
        """See `RoundLoop`."""
        return len(self._queue) if self._is_on_arrival else self._gathered.count

    def _merge_ahead(self) -> None:
        count = self._gathered.merge_ahead()
        self._gathered.merged += count
        self._merge(count)

    def _close(self) -> int:
        """See `RoundLoop`."""
        in_time: list[OwnPaceJourney] = []
        if self._is_on_arrival:
            late = [self._queue.popleft()]
            self._merge(1)
        else:
            found = self._gathered
            in_time = [site for site in self._sites if found.arrived[site.index]]
            late = list(self._queue)
            self._queue.clear()
            self._merge(found.count - found.merged + len(late))
            self._past_s[0].append(found.last_s)
        self._merging = [*in_time, *(site for site, _ in late)]
        self._course.contributions += len(self._merging)
        self._course.late += sum(version < self._current for _, version in late)
        return len(in_time) or 1

    def _publish(self) -> None:
        """See `RoundLoop`."""
        present = self.versions[0]
        for site in self._merging:
            self._merged_into[site.index] = present
            self._steps_merged += site.steps_sent
            work = wire.Work(steps=site.steps_sent, compute_s=site.steps_sent * site.step_s)
            self._paces.note(str(site.index), work)
        self._steps = dict(self._paces.steps())
        waiting, self._waiting = self._waiting, []
        if self._is_over():
            for site in self._sites:
                site.end()
            return
        stale = [s for s in self._queue if present - s[1] > self._policy.max_staleness]
        for item in stale:
            self._queue.remove(item)
            self._drop(item[0])
        for site, epoch in waiting:
            if epoch == site.epoch:
                self._answer(site)
