"""A site in virtual time: it steps, sends, fetches updates and lets them land, fails and returns.

The order of things is that of `fedwan.site`: at a step, updates land that have flown for τ steps
(the site waits for those that are not here), then what is due departs, and without overlap its
update is waited for at once. A site asks for an update before it sends. At a pace of its own it
fetches updates one by one until its contribution is in them; where updates are held no longer it
takes the whole weights.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fedwan.fragments import Fragment, due_step, reached_step
from fedwan.planner.costs import Load
from fedwan.planner.links import Pipe, WireLink
from fedwan.protocol.rounds import Answer, Key, Told

if TYPE_CHECKING:
    from fedwan.planner.virtual import Clock, Coordinator

__all__ = ["Outage", "SiteModel", "Timetable", "VirtualSite", "draw_outages"]

UNKNOWN = math.inf
"""A time that is not known yet."""


class Outage(NamedTuple):
    """A site is dead for a while."""

    from_s: float
    until_s: float


def draw_outages(
    seed: int, site: int, horizon_s: float, mean_up_s: float, mean_down_s: float
) -> tuple[Outage, ...]:
    """When a site fails, before the horizon, and returns: both times are exponential."""
    draw = random.Random(f"{seed} outage {site}")
    outages: list[Outage] = []
    now_s = draw.expovariate(1 / mean_up_s)
    while now_s < horizon_s:
        outages.append(Outage(now_s, now_s + draw.expovariate(1 / mean_down_s)))
        now_s = outages[-1].until_s + draw.expovariate(1 / mean_up_s)
    return tuple(outages)


@dataclass(frozen=True)
class SiteModel:
    """What one site is like."""

    step_s: float
    link: WireLink
    outages: tuple[Outage, ...] = ()


class Departure(NamedTuple):
    """When a contribution leaves."""

    step: int
    fragment: int
    version: int


@dataclass(frozen=True)
class Timetable:
    """What all sites share."""

    h: int
    tau: int
    num_steps: int
    fragments: Sequence[Fragment]
    loads: Sequence[Load]
    global_bytes: int
    is_paced: bool
    """Sites keep a pace of their own."""
    max_staleness: int
    departures: Sequence[Departure] = field(init=False)
    """In order; of sites that keep the schedule."""

    def __post_init__(self) -> None:
        rounds = self.num_steps // self.h
        found = sorted(
            Departure(due_step(f, version, self.h, self.num_steps), f.index, version)
            for f in self.fragments
            for version in range(rounds * f.times)
        )
        object.__setattr__(self, "departures", found)


class _Line:
    """One direction of a link: transfers go one after the other (`fedwan.link.scheduler`)."""

    __slots__ = ("free_at_s", "pipe")

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.free_at_s = -math.inf

    def carry(self, num_bytes: float, from_s: float) -> float:
        """When the last byte has arrived, of bytes that are there at a time to be sent."""
        begins_s = max(from_s, self.free_at_s)
        idle_s = begins_s - self.free_at_s
        self.free_at_s = begins_s + self.pipe.transfer_s(num_bytes, idle_s)
        return self.free_at_s + self.pipe.rtt_s / 2


class _Flight:
    """A contribution on its way up, or the update that answers it on its way down."""

    __slots__ = ("asks_at_s", "key", "lands_at", "ready_at_s", "steps", "whole_s")

    def __init__(
        self, key: Key, steps: int, lands_at: int, asks_at_s: float, whole_s: float
    ) -> None:
        self.key = key
        self.steps = steps
        self.lands_at = lands_at
        self.asks_at_s = asks_at_s  # when the coordinator knows that the site wants the update
        self.whole_s = whole_s  # when the contribution is checked
        self.ready_at_s = UNKNOWN  # when the update is here and added to the global weights


class VirtualSite:
    """One site's way through the run."""

    def __init__(
        self, name: str, model: SiteModel, table: Timetable, clock: Clock, hub: Coordinator
    ) -> None:
        self.name = name
        self.step_s = model.step_s
        self.epoch = 0
        """Grows when what is on its way becomes void."""
        self.compute_s = 0.0
        self.steps_taken = 0
        """Those that were lost count too."""
        self.bytes_up = self.bytes_down = self.rejoins = 0
        self.marks = [math.nan] * (table.num_steps // table.h + 1)
        """When the step after so many times H began."""
        self.ended_s = UNKNOWN
        """When it had its last update."""
        self._table = table
        self._clock = clock
        self._hub = hub
        self._up, self._down = _Line(model.link.up), _Line(model.link.down)
        self._rtt_s = model.link.up.rtt_s
        self._step = 0
        self._stretch_ends_s = 0.0
        self._flights: deque[_Flight] = deque()
        self._turn = 0  # departures so far, of a site that keeps the schedule
        self._version = 0  # of the global weights that it has, at a pace of its own
        self._steps = self._due = table.h  # until the next upload, at a pace of its own
        self._encoder_free_at_s = 0.0
        self._is_waiting = False
        clock.at(0.0, self._go_on, 0)
        for outage in model.outages:
            clock.at(outage.from_s, self._die)
            clock.at(outage.until_s, self._come_back)

    # The step loop --------------------------------------------------------------------------

    def _go_on(self, epoch: int) -> None:
        """It has completed its step, or what it waited for is here."""
        if epoch != self.epoch:
            return
        now_s = self._land(self._clock.now_s)
        if now_s == UNKNOWN:
            return
        now_s = self._depart_all(now_s)
        if self.epoch == epoch:
            now_s = self._land(now_s)
            if now_s != UNKNOWN:
                self._walk(now_s)

    def _walk(self, now_s: float) -> None:
        """Step until something departs or lands."""
        table, flights, step = self._table, self._flights, self._step
        until = self._due if table.is_paced else table.num_steps
        if not table.is_paced:
            if step >= table.num_steps:
                self.marks[-1] = self.ended_s = now_s
                return
            if self._turn < len(table.departures):
                until = min(until, table.departures[self._turn].step)
            if flights:
                until = min(until, flights[0].lands_at)
        for index in range(-(-step // table.h), -(-until // table.h)):
            if index >= len(self.marks):
                self.marks.append(math.nan)  # it takes more than its share of the run's steps
            self.marks[index] = now_s + (index * table.h - step) * self.step_s
        walked_s = (until - step) * self.step_s
        self.steps_taken += until - step
        self._step = until
        self.compute_s += walked_s
        self._stretch_ends_s = now_s + walked_s
        self._clock.at(self._stretch_ends_s, self._go_on, self.epoch)

    def _land(self, now_s: float) -> float:
        """Let land what has flown long enough; the time afterwards, unknown if it must wait."""
        flights, step, table = self._flights, self._step, self._table
        is_last = not table.is_paced and step >= table.num_steps
        while flights and (is_last or flights[0].lands_at <= step):
            ready_at_s = flights[0].ready_at_s
            if ready_at_s > now_s:
                self._is_waiting = ready_at_s == UNKNOWN
                if not self._is_waiting:
                    self._clock.at(ready_at_s, self._go_on, self.epoch)
                return UNKNOWN
            now_s += table.loads[flights.popleft().key.fragment].land_s
            self._due = step + self._steps
        return now_s

    def _depart_all(self, now_s: float) -> float:
        """Send off what is due; the time at which the step loop goes on."""
        table, step = self._table, self._step
        if table.is_paced:
            if step < self._due:
                return now_s
            return self._depart(Key(0, self._version, self.name), self._steps, now_s)
        while self._turn < len(table.departures):
            due, fragment, version = table.departures[self._turn]
            if due > step:
                break
            self._turn += 1
            now_s = self._depart(Key(fragment, version, self.name), table.h, now_s)
        return now_s

    def _depart(self, key: Key, steps: int, now_s: float) -> float:
        table = self._table
        load = table.loads[key.fragment]
        tau = min(table.tau, table.fragments[key.fragment].steps(table.h) - 1)
        now_s += load.hold_s
        coded_s = max(now_s, self._encoder_free_at_s) + load.encode_s
        self._encoder_free_at_s = coded_s
        # With overlap a tensor leaves as soon as it is coded; else the site saves in between.
        leaves_s = now_s if table.tau else coded_s
        arrives_s = self._up.carry(load.up_bytes, leaves_s)
        self.bytes_up += load.up_bytes
        whole_s = max(arrives_s, coded_s + self._rtt_s / 2) + load.check_s
        asks_at_s = leaves_s + self._rtt_s / 2
        flight = _Flight(key, steps, self._step + tau, asks_at_s, whole_s)
        self._flights.append(flight)
        self._clock.at(whole_s, self._hub.arrive, self, key, steps, self.epoch)
        self._hub.ask(self, flight, key.version + 1)
        return now_s

    # What it hears --------------------------------------------------------------------------

    def settle(self, is_stale: bool) -> None:
        """What became of a contribution."""
        if is_stale and self._table.is_paced:
            self.start_over()

    def hear(
        self, flight: _Flight, answer: Answer, version: int, num_bytes: int, told: Told
    ) -> None:
        """The coordinator answers."""
        now_s = max(self._clock.now_s, flight.asks_at_s)
        table = self._table
        if answer == "superseded":
            if not table.is_paced:
                self.start_over()
                return
            now_s += self._rtt_s  # told that the update is gone, it asks for the weights
        here_s = self._down.carry(num_bytes, now_s) + table.loads[flight.key.fragment].apply_s
        self.bytes_down += num_bytes
        if table.is_paced:
            self._clock.at(here_s, self._take, flight, version, told, self.epoch)
        else:
            self._is_ready(flight, max(here_s, flight.whole_s))

    def _take(self, flight: _Flight, version: int, told: Told, epoch: int) -> None:
        """At a pace of its own: an update is here, and perhaps not the last of them."""
        if epoch != self.epoch:
            return
        self._version, sent = version, flight.key.version
        self._steps = told.steps or self._table.h
        is_merged = 0 < told.merged_into <= version and told.merged_from >= sent
        if is_merged or version > sent + 1 + self._table.max_staleness:
            self._is_ready(flight, self._clock.now_s)
        else:
            flight.asks_at_s = self._clock.now_s + self._rtt_s / 2
            self._hub.ask(self, flight, version + 1)

    def _is_ready(self, flight: _Flight, ready_at_s: float) -> None:
        flight.ready_at_s = ready_at_s
        if self._is_waiting and flight is self._flights[0]:
            self._is_waiting = False
            self._clock.at(ready_at_s, self._go_on, self.epoch)

    def end(self) -> None:
        """The run is over: at a pace of its own it takes the final weights."""
        if self.ended_s == UNKNOWN and self._table.is_paced:
            self._void()
            told_s = self._clock.now_s + self._rtt_s
            self.ended_s = self._down.carry(self._table.global_bytes, told_s)

    # Failures -------------------------------------------------------------------------------

    def _die(self) -> None:
        """Its process ends, with all that is on its way."""
        self._hub.num_live -= 1
        self._void()

    def _come_back(self) -> None:
        self._hub.num_live += 1
        if self.ended_s == UNKNOWN:
            self.start_over()

    def _void(self) -> None:
        now_s = self._clock.now_s
        self.epoch += 1
        self._flights.clear()
        self._is_waiting = False
        self._encoder_free_at_s = min(self._encoder_free_at_s, now_s)
        lost_s = max(0.0, self._stretch_ends_s - now_s)
        self.compute_s -= lost_s
        self._stretch_ends_s = now_s

    def start_over(self) -> None:
        """It joins again, or its update is gone: it takes the global weights."""
        self._void()
        self.rejoins += 1
        now_s = self._clock.now_s
        # What it had queued is gone with its connections.
        for line in (self._up, self._down):
            line.free_at_s = min(line.free_at_s, now_s)
        here_s = self._down.carry(self._table.global_bytes, now_s + self._rtt_s)
        self.bytes_down += self._table.global_bytes
        self._clock.at(here_s, self._adopt, tuple(self._hub.rounds.versions), self.epoch)

    def _adopt(self, versions: tuple[int, ...], epoch: int) -> None:
        if epoch != self.epoch:
            return
        table = self._table
        if table.is_paced:
            (self._version,) = versions
            self._due = self._step + self._steps
        else:
            self._step = reached_step(table.fragments, versions, table.h, table.num_steps)
            self._turn = sum(versions)
        self._go_on(epoch)
