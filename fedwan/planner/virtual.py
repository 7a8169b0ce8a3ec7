"""A run in virtual time: the coordinator's own state machine, without weights or sockets.

`fedwan.protocol.rounds` says what is wanted, merged, dropped and told; sites (`virtual_site`) and
lines (`links`) say when things happen, `costs` what the work takes. The machine is asked whenever
something arrives, and every `TICK_S`, as by the real coordinator.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedwan.link import wire_pb2 as wire
from fedwan.planner.costs import Costs, global_bytes, loads_of
from fedwan.planner.virtual_site import SiteModel, Timetable, VirtualSite, _Flight
from fedwan.protocol.rounds import Key, Round, Rounds
from fedwan.state import Layout
from fedwan.strategy import Strategy

__all__ = ["Clock", "Coordinator", "Course", "RoundNote", "run_virtually"]

TICK_S = 0.5
"""As `fedwan.coordinator.run.TICK_S`."""


class RoundNote(NamedTuple):
    """How one round of one fragment went."""

    fragment: int
    version: int
    """That it led to."""
    began_s: float
    """When the coordinator turned to it."""
    closed_s: float
    contributions: int
    """In time."""


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
    """By site."""
    num_steps: int = 0
    """Of all sites; those that were lost count too."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Without the final weights of sites at a pace of their own."""
    marks: list[list[float]] = field(default_factory=list)
    """By site, when the step after so many times H began; NaN where it never came by."""
    stopped: str = ""
    """Why it ended early, if it did."""

    def utilisation(self, step_s: Sequence[float], h: int, first: int, last: int) -> float:
        """Share of the time in which sites compute, between the starts of two rounds."""
        return statistics.mean(
            _share(marks, h * seconds, first, last)
            for seconds, marks in zip(step_s, self.marks, strict=True)
        )


def _share(marks: Sequence[float], steps_s: float, first: int, last: int) -> float:
    begun = [index for index in range(first + 1, last + 1) if not math.isnan(marks[index])]
    if not begun:
        return math.nan
    return (begun[-1] - first) * steps_s / (marks[begun[-1]] - marks[first])


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
        while self._heap and not self._is_stopped:
            self.now_s, _, call, args = heapq.heappop(self._heap)
            call(*args)


class _Sent(NamedTuple):
    work: wire.Work


class _Update(NamedTuple):
    num_bytes: int


class Coordinator:
    """The machine in virtual time."""

    def __init__(
        self, strategy: Strategy, table: Timetable, num_sites: int, clock: Clock, course: Course
    ) -> None:
        self.names = [f"s{index:06}" for index in range(num_sites)]
        self.num_live = num_sites
        keeps = strategy.policy.arrivals_from is not None
        self.rounds: Rounds[_Sent, _Update] = Rounds(
            strategy,
            table.fragments,
            self.names,
            table.num_steps // table.h,
            1,
            table.global_bytes if keeps else 0,
        )
        self._table = table
        self._clock = clock
        self._course = course
        self._sites: Sequence[VirtualSite] = ()
        self._waiting: dict[tuple[int, int], list[tuple[VirtualSite, _Flight, int]]] = {}
        self._works: dict[tuple[int, float], _Sent] = {}
        self._free_at_s = 0.0  # when all merging so far is done

    def open(self, sites: Sequence[VirtualSite]) -> None:
        """The sites are there."""
        self._sites = sites
        self._begin()

    # What sites do --------------------------------------------------------------------------

    def arrive(self, site: VirtualSite, key: Key, steps: int, epoch: int) -> None:
        """A contribution is whole and checked."""
        if epoch != site.epoch:
            return  # it failed before this was whole
        rounds = self.rounds
        settled = rounds.settled(key)
        if settled == "stale":
            rounds.note_dropped(key)
        elif not settled:
            rounds.announce(key)
            rounds.arrive(key, self._sent(steps, site.step_s), self._clock.now_s)
            present = rounds.round
            if present and not present.is_closed and present.fragment.index == key.fragment:
                self._consider()
        site.settle(settled == "stale")

    def _sent(self, steps: int, step_s: float) -> _Sent:
        found = self._works.get((steps, step_s))
        if found is None:
            work = wire.Work(steps=steps, samples=steps, compute_s=steps * step_s)
            found = self._works[steps, step_s] = _Sent(work)
        return found

    def ask(self, site: VirtualSite, flight: _Flight, version: int) -> None:
        """A site wants an update; it hears at once or when it is out."""
        fragment = flight.key.fragment
        answer, update = self.rounds.answer(site.name, fragment, version)
        if answer == "done":
            site.end()
        elif answer == "wait":
            waiting = self._waiting.setdefault((fragment, version), [])
            waiting.append((site, flight, site.epoch))
        else:
            num_bytes = update.num_bytes if update else self._table.global_bytes
            version = version if update else self.rounds.versions[fragment]
            told = self.rounds.tell(site.name, fragment)
            site.hear(flight, answer, version, num_bytes, told)

    # Rounds ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Turn to the next round."""
        rounds = self.rounds
        if rounds.is_done:
            rounds.is_over = True
            for site in self._sites:
                site.end()
            return
        present = rounds.begin(self._clock.now_s)
        self._consider()
        if not present.is_closed:
            self._clock.at(self._clock.now_s + TICK_S, self._tick, present)

    def _tick(self, present: Round[_Sent]) -> None:
        if present is self.rounds.round and not present.is_closed:
            self._consider()
            if not present.is_closed:
                self._clock.at(self._clock.now_s + TICK_S, self._tick, present)

    def _consider(self) -> None:
        """Ask the machine, and do what it says."""
        now_s, present = self._clock.now_s, self.rounds.round
        assert present is not None
        verdict, merges = self.rounds.advance(now_s, self.num_live)
        load = self._table.loads[present.fragment.index]
        if merges:  # one after the other
            self._free_at_s = max(self._free_at_s, now_s) + len(merges) * load.merge_s
        if verdict == "stop":
            num_arrived = len(self.names) - len(present.waiting)
            self._course.stopped = (
                f"round {present.version + 1} had {num_arrived} of "
                f"{len(self.names)} contributions after {now_s - present.began_s:g} s"
            )
            self._clock.stop()
        elif verdict == "close":
            late = sum(merge.staleness > 0 for merge in present.merged)
            self._course.contributions += len(present.merged)
            self._course.late += late
            in_time = 1 if present.is_on_arrival else len(present.merged) - late
            fragment, version = present.fragment.index, present.version + 1
            self._course.rounds.append(
                RoundNote(fragment, version, present.began_s, now_s, in_time)
            )
            self._clock.at(max(now_s, self._free_at_s) + load.commit_s, self._commit)

    def _commit(self) -> None:
        present = self.rounds.round
        assert present is not None
        fragment, version = present.fragment.index, present.version + 1
        self.rounds.publish(_Update(self._table.loads[fragment].down_bytes))
        for site, flight, epoch in self._waiting.pop((fragment, version), ()):
            if epoch == site.epoch:
                self.ask(site, flight, version)
        self._begin()


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
        ConfigError: the layout cannot be cut as the strategy wants.
    """
    costs = costs or Costs()
    fragments = strategy.fragments(layout)
    table = Timetable(
        strategy.h,
        strategy.overlap.tau,
        num_steps,
        fragments,
        loads_of(strategy, fragments, costs),
        global_bytes(layout, costs),
        strategy.clock == "samples",
        strategy.policy.max_staleness,
    )
    clock, course = Clock(), Course()
    hub = Coordinator(strategy, table, len(sites), clock, course)
    parties = [
        VirtualSite(name, model, table, clock, hub)
        for name, model in zip(hub.names, sites, strict=True)
    ]
    hub.open(parties)
    clock.run()
    course.wall_s = clock.now_s if course.stopped else max(party.ended_s for party in parties)
    course.dropped = hub.rounds.dropped
    course.compute_s = [party.compute_s for party in parties]
    course.marks = [party.marks for party in parties]
    course.num_steps = sum(party.steps_taken for party in parties)
    course.rejoins = sum(party.rejoins for party in parties)
    course.bytes_up = sum(party.bytes_up for party in parties)
    course.bytes_down = sum(party.bytes_down for party in parties)
    return course
