"""A site that keeps the schedule: it steps, lets fragments depart and updates land.

The order of things is that of `fedwan.site.delta.DeltaExchange.after_step`: at a step, updates land
that have flown for τ steps (the site waits for those that are not here), then what is due departs,
and without overlap its update is waited for at once. Gradients are the same with H = 1 and no
overlap. Departures are those of `fedwan.fragments.due_step`.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from fedwan.fragments import reached_step
from fedwan.planner.clock import Clock
from fedwan.planner.virtual_site import UNKNOWN, Hub, SiteModel, Timetable, VirtualSite

__all__ = ["Journey", "ScheduleHub"]


class ScheduleHub(Hub, Protocol):
    """What a site sees of a coordinator that takes rounds in the schedule's order."""

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


class Journey(VirtualSite):
    """See `VirtualSite`; a round has the number version x fragments + fragment."""

    def __init__(
        self, index: int, model: SiteModel, table: Timetable, clock: Clock, hub: ScheduleHub
    ) -> None:
        super().__init__(index, model, table, clock, hub)
        self._desk = hub
        self._flights: deque[_Flight] = deque()
        self._turn = 0  # departures so far, which is the number of the next round
        self._encoder_free_at_s = 0.0
        self._is_waiting = False

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
        self._take_steps(until - self._step, now_s)
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
        # It asks for the update before it sends (`fedwan.site.asking`).
        asks_at_s = (now_s if table.tau else coded_s) + rtt_s / 2
        self._flights.append(_Flight(turn, self._step + table.tau, asks_at_s))
        self.bytes_up += load.up_bytes
        self._clock.at(whole_s, self._desk.arrive, self, turn, self.epoch)
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

    def _drop(self) -> None:
        """See `VirtualSite`."""
        self._flights.clear()
        self._is_waiting = False
        self._encoder_free_at_s = min(self._encoder_free_at_s, self._clock.now_s)

    def _place(self, versions: tuple[int, ...]) -> None:
        """See `VirtualSite`."""
        table = self._table
        self._step = reached_step(table.fragments, versions, table.h, table.num_steps)
        self._turn = sum(versions)
