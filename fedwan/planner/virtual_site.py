"""A site in virtual time: it steps, lets fragments depart and updates land, fails and returns.

The order of things is that of `fedwan.site.delta.DeltaExchange.after_step`: at a step, updates land
that have flown for τ steps (the site waits for those that are not here), then what is due departs,
and without overlap its update is waited for at once. Gradients are the same with H = 1 and no
overlap. Departures are those of `fedwan.fragments.due_step`.

Transfers of one direction go one after the other (`fedwan.link.turns`), so that a line needs no
events of its own: when it is free says all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedwan.fragments import Fragment, due_step, reached_step
from fedwan.planner.clock import Clock
from fedwan.planner.loads import Load
from fedwan.planner.weather import Outage, Season
from fedwan.planner.wire_model import Pipe

__all__ = ["Hub", "Journey", "SiteModel", "Timetable"]

UNKNOWN = math.inf


@dataclass(frozen=True)
class SiteModel:
    """What one site is like."""

    step_s: float
    seasons: tuple[Season, ...]
    """Its link; the first from 0 s on."""
    outages: tuple[Outage, ...] = ()


@dataclass(frozen=True)
class Timetable:
    """What all sites of equal H share; a round has the number version · fragments + fragment."""

    h: int
    tau: int
    num_steps: int
    fragments: Sequence[Fragment]
    loads: Sequence[Load]
    global_bytes: int
    departures: Sequence[int] = field(init=False)
    """The step after which a round's contribution leaves."""

    def __post_init__(self) -> None:
        versions = self.num_steps // self.h
        steps = [
            due_step(fragment, version, self.h, self.num_steps)
            for version in range(versions)
            for fragment in self.fragments
        ]
        object.__setattr__(self, "departures", steps)


class Hub(Protocol):
    """What a site sees of the coordinator."""

    versions: list[int]
    """Published, by fragment."""

    def arrive(self, site: Journey, round_index: int, epoch: int) -> None:
        """A contribution is whole and checked."""
        ...


class _Flight:
    __slots__ = ("asks_at_s", "lands_at", "ready_at_s", "round_index")

    def __init__(self, round_index: int, lands_at: int, asks_at_s: float) -> None:
        self.round_index = round_index
        self.lands_at = lands_at
        self.asks_at_s = asks_at_s  # when the coordinator knows that the site wants the update
        self.ready_at_s = UNKNOWN  # when the update is here and added to the global weights


class _Line:
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


class Journey:
    """One site's way through the run.

    Args:
        index: its place in site order.
        model: what it is like.
        table: of its H.
        clock: virtual time.
        hub: the coordinator.
    """

    def __init__(
        self, index: int, model: SiteModel, table: Timetable, clock: Clock, hub: Hub
    ) -> None:
        self.index = index
        self.epoch = 0
        """Grows when what is on its way becomes void."""
        self.compute_s = 0.0
        self.bytes_up = 0
        self.bytes_down = 0
        self.rejoins = 0
        self.marks = [math.nan] * (table.num_steps // table.h + 1)
        """When the step after so many times H began."""
        self.ended_s = UNKNOWN
        """When it had its last update."""
        self._model = model
        self._table = table
        self._clock = clock
        self._hub = hub
        self._up = _Line([(season.from_s, season.link.up) for season in model.seasons])
        self._down = _Line([(season.from_s, season.link.down) for season in model.seasons])
        self._flights: deque[_Flight] = deque()
        self._step = 0
        self._turn = 0  # departures so far, which is the number of the next round
        self._encoder_free_at_s = 0.0
        self._stretch_ends_s = 0.0
        self._is_waiting = False
        clock.at(0.0, self._go_on, 0)
        for outage in model.outages:
            clock.at(outage.from_s, self._fail)
            clock.at(outage.until_s, self._come_back)

    # The step loop --------------------------------------------------------------------------

    def _go_on(self, epoch: int) -> None:
        """It has completed its step, or what it waited for is here."""
        if epoch != self.epoch:
            return
        table, step = self._table, self._step
        now_s = self._land(self._clock.now_s)
        if now_s == UNKNOWN:
            return
        departures, turn = table.departures, self._turn
        while turn < len(departures) and departures[turn] <= step:
            now_s = self._depart(turn, now_s)
            turn += 1
        self._turn = turn
        now_s = self._land(now_s)
        if now_s == UNKNOWN:
            return
        if step % table.h == 0:
            self.marks[step // table.h] = now_s
        if step < table.num_steps:
            self._walk(now_s)
        else:
            self.ended_s = now_s

    def _walk(self, now_s: float) -> None:
        """Step until something departs or lands."""
        table, flights = self._table, self._flights
        until = table.num_steps
        if self._turn < len(table.departures):
            until = min(until, table.departures[self._turn])
        if flights:
            until = min(until, flights[0].lands_at)
        walked_s = (until - self._step) * self._model.step_s
        self._step = until
        self.compute_s += walked_s
        self._stretch_ends_s = now_s + walked_s
        self._clock.at(self._stretch_ends_s, self._go_on, self.epoch)

    def _land(self, now_s: float) -> float:
        """Let land what has flown long enough; the time afterwards, unknown if it must wait."""
        flights, step = self._flights, self._step
        is_last = step >= self._table.num_steps
        while flights and (is_last or flights[0].lands_at <= step):
            ready_at_s = flights[0].ready_at_s
            if ready_at_s > now_s:
                self._is_waiting = ready_at_s == UNKNOWN
                if not self._is_waiting:
                    self._clock.at(ready_at_s, self._go_on, self.epoch)
                return UNKNOWN
            flight = flights.popleft()
            loads = self._table.loads
            now_s += loads[flight.round_index % len(loads)].land_s
        return now_s

    def _depart(self, turn: int, now_s: float) -> float:
        """Send a contribution off; the time at which the step loop goes on."""
        table = self._table
        load = table.loads[turn % len(table.loads)]
        now_s += load.hold_s
        coded_s = max(now_s, self._encoder_free_at_s) + load.encode_s
        self._encoder_free_at_s = coded_s
        # With overlap a tensor leaves as soon as it is coded; else the site saves in between.
        arrives_s = self._up.carry(load.up_bytes, now_s if table.tau else coded_s)
        rtt_s = self._up.pipe_at(now_s).rtt_s
        whole_s = max(arrives_s, coded_s + rtt_s / 2) + load.check_s
        # With overlap it asks at once; else the receipt goes down, then the question comes up.
        asks_at_s = now_s + rtt_s / 2 if table.tau else whole_s + rtt_s
        self._flights.append(_Flight(turn, self._step + table.tau, asks_at_s))
        self.bytes_up += load.up_bytes
        self._clock.at(whole_s, self._hub.arrive, self, turn, self.epoch)
        return now_s

    def deliver(self, round_index: int) -> None:
        """The update of a round is published, and this site's contribution to it has arrived."""
        for flight in self._flights:
            if flight.round_index == round_index:
                break
        else:
            return  # it failed meanwhile
        load = self._table.loads[round_index % len(self._table.loads)]
        asked_s = max(self._clock.now_s, flight.asks_at_s)
        flight.ready_at_s = self._down.carry(load.down_bytes, asked_s) + load.apply_s
        self.bytes_down += load.down_bytes
        if self._is_waiting and flight is self._flights[0]:
            self._is_waiting = False
            self._clock.at(flight.ready_at_s, self._go_on, self.epoch)

    # Failures -------------------------------------------------------------------------------

    def _fail(self) -> None:
        """It dies, with all that is on its way."""
        self.epoch += 1
        self._flights.clear()
        self._is_waiting = False
        self.compute_s -= max(0.0, self._stretch_ends_s - self._clock.now_s)
        self._stretch_ends_s = self._clock.now_s

    def _come_back(self) -> None:
        if self.ended_s == UNKNOWN:
            self.start_over()

    def start_over(self) -> None:
        """It joins again, or was told that what it contributes to is past: global weights."""
        self._fail()
        self.rejoins += 1
        now_s = self._clock.now_s
        # What it had queued is gone with its connections.
        for line in (self._up, self._down):
            line.free_at_s = min(line.free_at_s, now_s)
        self._encoder_free_at_s = now_s
        rtt_s = self._down.pipe_at(now_s).rtt_s
        here_s = self._down.carry(self._table.global_bytes, now_s + rtt_s)
        self.bytes_down += self._table.global_bytes
        self._clock.at(here_s, self._adopt, tuple(self._hub.versions), self.epoch)

    def _adopt(self, versions: tuple[int, ...], epoch: int) -> None:
        if epoch != self.epoch:
            return
        table = self._table
        self._step = reached_step(table.fragments, versions, table.h, table.num_steps)
        self._turn = sum(versions)
        self._go_on(epoch)
