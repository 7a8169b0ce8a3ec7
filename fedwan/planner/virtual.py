"""A run in virtual time: the strategy's own round policy and schedule, without weights or sockets.

    sites (`virtual_site`)   step; fragments depart after `due_step`, stand in line, land after τ
    the coordinator (here)   takes rounds in the schedule's order, asks `strategy.policy` whenever
                             something arrives and every `TICK_S`, merges in site order, commits,
                             publishes
    lines (`wire_model`)     rate, round trip, slow start, loss; they change, sites fail and return

What arrives for a round that is over is merged into the fragment's next version, if the policy
bears its staleness, or dropped; its site gets the update if it is still out, else the global
weights, as from `fedwan.coordinator.outbox`. Sites at a pace of their own are not simulated yet.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedwan.coordinator.rounds import PAST_ROUNDS, TICK_S
from fedwan.errors import ConfigError
from fedwan.planner.clock import Clock
from fedwan.planner.costs import Costs
from fedwan.planner.loads import Load, global_bytes, loads_of
from fedwan.planner.virtual_site import Journey, SiteModel, Timetable
from fedwan.state import Layout
from fedwan.strategy import Strategy

__all__ = ["Course", "RoundNote", "run_virtually"]


class RoundNote(NamedTuple):
    """How one round of one fragment went."""

    fragment: int
    version: int
    """That it led to."""
    began_s: float
    """When the coordinator turned to it."""
    closed_s: float
    contributions: int


@dataclass
class Course:
    """How a run went."""

    wall_s: float = 0.0
    """Until the last site had its last update."""
    rounds: list[RoundNote] = field(default_factory=list)
    contributions: int = 0
    """That were merged."""
    late: int = 0
    """Of these, into a later version than the one they were made for."""
    dropped: int = 0
    """That came too late to be merged."""
    rejoins: int = 0
    compute_s: list[float] = field(default_factory=list)
    """By site; steps that were lost count too."""
    bytes_up: int = 0
    bytes_down: int = 0
    marks: list[list[float]] = field(default_factory=list)
    """By site, when the step after so many times H began; NaN where it never came by."""
    busy_s: float = 0.0
    """That the coordinator merged and committed."""
    stopped: str = ""
    """Why it ended early, if it did."""

    def utilisation(self, step_s: Sequence[float], h: int, first: int, last: int) -> float:
        """Share of the time in which sites compute, between the starts of two rounds.

        Args:
            step_s: of each site.
            h: steps of a round.
            first: the round whose start is the beginning.
            last: the round whose start is the end.
        """
        return statistics.mean(
            (last - first) * h * seconds / (marks[last] - marks[first])
            for seconds, marks in zip(step_s, self.marks, strict=True)
        )


def run_virtually(
    strategy: Strategy,
    layout: Layout,
    sites: Sequence[SiteModel],
    num_steps: int,
    costs: Costs | None = None,
) -> Course:
    """Let a run take place in virtual time.

    Args:
        strategy: the recipe.
        layout: of the whole model.
        sites: in site order.
        num_steps: per site, a multiple of the strategy's H.
        costs: of coding and merging.

    Raises:
        ConfigError: the layout cannot be cut as the strategy wants, or its sites keep a pace of
            their own.
    """
    if strategy.clock != "versions":
        raise ConfigError(
            "a plan cannot follow sites that keep a pace of their own yet; take a strategy whose "
            "rounds wait for all sites, or leave round.least_steps out"
        )
    fragments = strategy.fragments(layout)
    table = Timetable(
        strategy.h,
        strategy.overlap.tau,
        num_steps,
        fragments,
        loads_of(strategy, fragments, costs or Costs()),
        global_bytes(layout),
    )
    clock, course = Clock(), Course()
    coordinator = _Coordinator(strategy, table, clock, course)
    journeys = [
        Journey(index, model, table, clock, coordinator) for index, model in enumerate(sites)
    ]
    coordinator.open(journeys)
    clock.run()
    ends_s = [journey.ended_s for journey in journeys]
    course.wall_s = clock.now_s if course.stopped else max(ends_s)
    course.compute_s = [journey.compute_s for journey in journeys]
    course.marks = [journey.marks for journey in journeys]
    course.rejoins = sum(journey.rejoins for journey in journeys)
    course.bytes_up = sum(journey.bytes_up for journey in journeys)
    course.bytes_down = sum(journey.bytes_down for journey in journeys)
    return course


class _Round:
    """What has come for a version of a fragment."""

    __slots__ = ("arrived", "count", "last_s", "late", "merged", "next_site")

    def __init__(self, num_sites: int) -> None:
        self.arrived = bytearray(num_sites)
        self.count = 0
        self.merged = 0
        self.last_s = 0.0  # when the last one came that was in time
        self.next_site = 0  # all before it are merged
        self.late: list[Journey] = []


class _Coordinator:
    """Implements `fedwan.planner.virtual_site.Hub`; one thread, as the real round loop."""

    def __init__(self, strategy: Strategy, table: Timetable, clock: Clock, course: Course) -> None:
        self._policy = strategy.policy
        self._loads: Sequence[Load] = table.loads
        self._num_rounds = len(table.departures)
        self._clock = clock
        self._course = course
        self._journeys: Sequence[Journey] = ()
        self._rounds: dict[int, _Round] = {}
        self._current = 0
        self._is_collecting = False
        self._began_s = 0.0
        self._free_at_s = 0.0  # when all merging so far is done
        self._past_s = [deque[float](maxlen=PAST_ROUNDS) for _ in self._loads]
        self._num_late = [0] * len(self._loads)  # to be merged into the next version
        self._updates = [0] * len(self._loads)  # the version that is out, by fragment
        self.versions = [0] * len(self._loads)

    def open(self, journeys: Sequence[Journey]) -> None:
        """The sites are there."""
        self._journeys = journeys
        self._begin(0)

    def arrive(self, site: Journey, round_index: int, epoch: int) -> None:
        """See `Hub`."""
        if epoch != site.epoch:
            return  # it failed before this was whole
        if round_index < self._current or (
            round_index == self._current and not self._is_collecting
        ):
            self._arrive_late(site, round_index)
            return
        found = self._round(round_index)
        if not found.arrived[site.index]:
            found.arrived[site.index] = 1
            found.count += 1
        if round_index == self._current:
            found.last_s = self._clock.now_s - self._began_s
            self._merge_ahead(found)
            self._consider()

    def _arrive_late(self, site: Journey, round_index: int) -> None:
        """Its round is over: it gets the update if it can, and starts over if not."""
        fragment, version = round_index % len(self._loads), round_index // len(self._loads)
        if round_index == self._current:
            found = self._rounds[round_index]
            if found.arrived[site.index]:
                return  # an earlier process of this site had sent it already
            found.late.append(site)
            self._take_late(fragment, 1)
            return
        # Where the round of the present version is closing, it will be in the one after that.
        present = self.versions[fragment]
        is_closing = not self._is_collecting and self._current % len(self._loads) == fragment
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

    def _round(self, index: int) -> _Round:
        found = self._rounds.get(index)
        if found is None:
            found = self._rounds[index] = _Round(len(self._journeys))
        return found

    def _begin(self, index: int) -> None:
        """Turn to the next round."""
        self._current = index
        if index >= self._num_rounds:
            return
        self._is_collecting = True
        self._began_s = self._clock.now_s
        self._merge_ahead(self._round(index))
        self._consider()
        if self._is_collecting:
            self._clock.at(self._began_s + TICK_S, self._tick, index)

    def _tick(self, index: int) -> None:
        if index == self._current and self._is_collecting:
            self._consider()
            if self._is_collecting:
                self._clock.at(self._clock.now_s + TICK_S, self._tick, index)

    def _merge_ahead(self, found: _Round) -> None:
        """While waiting, only a site whose predecessors are all merged can be merged."""
        before = found.next_site
        while found.next_site < len(found.arrived) and found.arrived[found.next_site]:
            found.next_site += 1
        self._merge(found, found.next_site - before)

    def _merge(self, found: _Round, count: int) -> None:
        found.merged += count
        spent_s = count * self._loads[self._current % len(self._loads)].merge_s
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + spent_s
        self._course.busy_s += spent_s

    def _consider(self) -> None:
        """Ask the policy, and do what it says."""
        found, now_s = self._rounds[self._current], self._clock.now_s
        fragment, version = self._current % len(self._loads), self._current // len(self._loads)
        past_s = self._past_s[fragment]
        verdict = self._policy.decide(found.count, now_s - self._began_s, past_s, version)
        if verdict == "wait":
            return
        self._is_collecting = False
        if verdict == "stop":
            self._course.stopped = (
                f"round {version + 1} had {found.count} of "
                f"{len(self._journeys)} contributions after {now_s - self._began_s:g} s"
            )
            self._clock.stop()
            return
        num_late, self._num_late[fragment] = self._num_late[fragment], 0
        self._merge(found, found.count - found.merged + num_late)
        past_s.append(found.last_s)
        self._updates[fragment] = 0
        self._course.contributions += found.count + num_late
        self._course.late += num_late
        self._course.rounds.append(
            RoundNote(fragment, version + 1, self._began_s, now_s, found.count)
        )
        commit_s = self._loads[fragment].commit_s
        self._course.busy_s += commit_s
        self._clock.at(self._free_at_s + commit_s, self._publish)

    def _publish(self) -> None:
        """Hand the update out, and turn to the next round."""
        index = self._current
        found = self._rounds.pop(index)
        fragment = index % len(self._loads)
        self.versions[fragment] += 1
        self._updates[fragment] = self.versions[fragment]
        for journey in self._journeys:
            if found.arrived[journey.index]:
                journey.deliver(index)
        for journey in found.late:
            journey.deliver(index)
        self._begin(index + 1)
