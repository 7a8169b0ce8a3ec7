"""A run in virtual time: the coordinator's own state machine, without weights or sockets.

The order of things at a site is that of `fedwan.site`: at a step, updates land that have flown for
τ steps (the site waits for those that are not here), then what is due departs, and without overlap
its update is waited for at once. A site asks for an update before it sends. All sites are alike, so
that strategies whose sites go at a pace of their own are none to plan.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedwan.fragments import due_step
from fedwan.link import wire_pb2 as wire
from fedwan.planner.costs import Costs, Pipe, WireLink, load_of
from fedwan.protocol.round import Key, Round
from fedwan.protocol.rounds import Rounds
from fedwan.state import Layout
from fedwan.strategy import Strategy

TICK_S = 0.5
"""The machine is asked whenever something arrives, and so often, as by the coordinator."""
_MOST_TICKS = 10_000
"""Within a round's patience: where that is of days, it is asked less often."""
UNKNOWN = math.inf


@dataclass
class Course:
    """How a run went, all sites together; `rounds` have fragment and version."""

    rounds: list[tuple[int, int]] = field(default_factory=list)
    contributions: int = 0
    num_steps: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    marks: list[list[float]] = field(default_factory=list)
    """By site, when the step after so many times H began, as far as it came."""
    stopped: str = ""
    """Why it ended early, if it did."""

    def utilisation(self, steps_s: float, first: int, last: int) -> float:
        """Share of the time in which sites compute, H steps `steps_s`, between two rounds."""
        return statistics.mean(
            (len(marks) - 1) * steps_s / (marks[-1] - marks[0]) if marks[1:] else math.nan
            for marks in (marks[first : last + 1] for marks in self.marks)
        )


class _Line:
    """One direction of a link: transfers go one after the other (`fedwan.link.transfers`)."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._free_at_s = -math.inf

    def carry(self, num_bytes: float, from_s: float) -> float:
        """When the last byte has arrived, of bytes that are there at a time to be sent."""
        begins_s = max(from_s, self._free_at_s)
        self._free_at_s = begins_s + num_bytes / self._pipe.bytes_per_s
        return self._free_at_s + self._pipe.rtt_s / 2


@dataclass(slots=True)
class _Sent:
    """A contribution on its way up, or the update that answers it on its way down.

    The coordinator hears at `asks_at_s` that the update is wanted, has checked the contribution at
    `whole_s`; the site has added the update to the global weights at `ready_at_s`.
    """

    key: Key
    lands_at: int
    asks_at_s: float
    whole_s: float
    ready_at_s: float = UNKNOWN


class _Site:
    """One site's way through the run."""

    def __init__(self, name: str, run: VirtualRun) -> None:
        self.name = name
        self._run = run
        self._up, self._down = _Line(run.link.up), _Line(run.link.down)
        self._rtt_s = run.link.up.rtt_s
        self._marks: list[float] = []
        run.course.marks.append(self._marks)
        self._step = 0
        self._flights: deque[_Sent] = deque()
        self._departures = deque(run.departures())
        self._encoder_free_at_s = 0.0
        self._is_waiting = False
        run.at(0.0, self._go_on)

    def _go_on(self) -> None:
        """It has completed its step, or what it waited for is here."""
        now_s = self._land(self._run.now_s)
        if now_s == UNKNOWN:
            return
        while self._departures and self._departures[0][0] <= self._step:
            _, fragment, version = self._departures.popleft()
            now_s = self._depart(Key(fragment, version, self.name), now_s)
        now_s = self._land(now_s)
        if now_s != UNKNOWN:
            self._walk(now_s)

    def _walk(self, now_s: float) -> None:
        """Step until something departs or lands."""
        run, step = self._run, self._step
        if step >= run.num_steps and not self._departures:
            return
        until = self._departures[0][0] if self._departures else run.num_steps
        if self._flights:
            until = min(until, self._flights[0].lands_at)
        for index in range(-(-step // run.h), -(-until // run.h)):
            self._marks.append(now_s + (index * run.h - step) * run.step_s)
        run.course.num_steps += until - step
        self._step = until
        run.at(now_s + (until - step) * run.step_s, self._go_on)

    def _land(self, now_s: float) -> float:
        """Let land what has flown long enough; the time afterwards, unknown if it must wait."""
        run, flights, step = self._run, self._flights, self._step
        while flights and (step >= run.num_steps or flights[0].lands_at <= step):
            ready_at_s = flights[0].ready_at_s
            if ready_at_s > now_s:
                self._is_waiting = ready_at_s == UNKNOWN
                if not self._is_waiting:
                    run.at(ready_at_s, self._go_on)
                return UNKNOWN
            now_s += run.loads[flights.popleft().key.fragment].land_s
        return now_s

    def _depart(self, key: Key, now_s: float) -> float:
        """Send off a contribution; the time at which the step loop goes on."""
        run, load = self._run, self._run.loads[key.fragment]
        now_s += load.hold_s
        coded_s = max(now_s, self._encoder_free_at_s) + load.encode_s
        self._encoder_free_at_s = coded_s
        # With overlap a tensor leaves as soon as it is coded; else the site saves in between.
        leaves_s = now_s if run.tau else coded_s
        arrives_s = self._up.carry(load.up_bytes, leaves_s)
        run.course.bytes_up += load.up_bytes
        whole_s = max(arrives_s, coded_s + self._rtt_s / 2) + load.check_s
        tau = min(run.tau, run.fragments[key.fragment].steps(run.h) - 1)
        flight = _Sent(key, self._step + tau, leaves_s + self._rtt_s / 2, whole_s)
        self._flights.append(flight)
        run.at(whole_s, run.arrive, key)
        self.ask(flight)
        return now_s

    def ask(self, flight: _Sent) -> None:
        """Want the update that a contribution goes into; it comes now, or once it is out."""
        run, fragment, version = self._run, flight.key.fragment, flight.key.version + 1
        answer, update = run.rounds.answer(self.name, fragment, version)
        if answer == wire.DownloadHeader.NOT_YET:
            run.waiting.setdefault((fragment, version), []).append((self, flight))
            return
        assert update is not None, "sites that are alike are never left behind"
        here_s = self._down.carry(update.num_bytes, max(run.now_s, flight.asks_at_s))
        run.course.bytes_down += update.num_bytes
        flight.ready_at_s = max(here_s + run.loads[fragment].apply_s, flight.whole_s)
        if self._is_waiting and flight is self._flights[0]:
            self._is_waiting = False
            run.at(flight.ready_at_s, self._go_on)


class _Payload(NamedTuple):
    num_bytes: int
    work: wire.Work


class VirtualRun:
    """A run of `num_steps` a site, a multiple of H: the clock, and the coordinator's machine."""

    def __init__(
        self,
        strategy: Strategy,
        layout: Layout,
        num_sites: int,
        num_steps: int,
        step_s: float,
        link: WireLink,
        costs: Costs,
    ) -> None:
        self.strategy, self.num_steps, self.step_s, self.link = strategy, num_steps, step_s, link
        self.fragments = strategy.fragments(layout)
        self.loads = [load_of(strategy, fragment, costs) for fragment in self.fragments]
        self.h, self.tau = strategy.h, strategy.overlap.tau
        assert strategy.clock == "versions"
        self.course = Course()
        self.now_s = 0.0
        self._tick_s = max(TICK_S, strategy.policy.patience_s / _MOST_TICKS)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._names = [f"s{index}" for index in range(num_sites)]
        self._num_rounds = num_steps // strategy.h
        self.rounds: Rounds[_Payload, _Payload] = Rounds(
            strategy, self.fragments, self._names, self._num_rounds, batch=1
        )
        work = wire.Work(steps=self.h, samples=self.h)
        self._sent = [_Payload(load.up_bytes, work) for load in self.loads]
        self._updates = [_Payload(load.down_bytes, work) for load in self.loads]
        self.waiting: dict[tuple[int, int], list[tuple[_Site, _Sent]]] = {}
        self._free_at_s = 0.0  # when all merging so far is done

    def at(self, moment_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have something called; calls of the same time go in the order in which they came."""
        self._num_events += 1
        heapq.heappush(self._heap, (moment_s, self._num_events, call, args))

    def play(self) -> Course:
        """From the beginning until nothing is left to happen."""
        for name in self._names:
            _Site(name, self)
        self._begin()
        while self._heap and not self.course.stopped:
            self.now_s, _, call, args = heapq.heappop(self._heap)
            call(*args)
        return self.course

    def departures(self) -> list[tuple[int, int, int]]:
        """Step, fragment and version of a site's contributions."""
        return sorted(
            (due_step(f, version, self.h, self.num_steps), f.index, version)
            for f in self.fragments
            for version in range(self._num_rounds * f.per_round)
        )

    def arrive(self, key: Key) -> None:
        """A contribution is whole and checked."""
        rounds = self.rounds
        if rounds.settled(key):
            return
        rounds.announce(key, self.now_s)
        rounds.arrive(key, self._sent[key.fragment], self.now_s)
        if rounds.round and rounds.round.fragment.index == key.fragment:
            self._consider(rounds.round)

    def _begin(self) -> None:
        """Turn to the next round."""
        if not self.rounds.is_done:
            self._tick(self.rounds.begin(self.now_s))

    def _tick(self, present: Round[_Payload]) -> None:
        self._consider(present)
        if not present.is_closed:
            self.at(self.now_s + self._tick_s, self._tick, present)

    def _consider(self, present: Round[_Payload]) -> None:
        """Ask the machine, and do what it says."""
        if present.is_closed:
            return
        verdict, merges = self.rounds.advance(self.now_s, len(self._names))
        load = self.loads[present.fragment.index]
        if merges:  # one after the other
            self._free_at_s = max(self._free_at_s, self.now_s) + len(merges) * load.merge_s
        if verdict == "stop":
            num_arrived = len(self._names) - len(present.waiting)
            self.course.stopped = (
                f"round {present.version + 1} had {num_arrived} of {len(self._names)} "
                f"contributions after {self.now_s - present.began_s:g} s"
            )
        elif verdict == "close":
            self.course.contributions += len(present.merged)
            self.course.rounds.append((present.fragment.index, present.version + 1))
            self.at(max(self.now_s, self._free_at_s) + load.commit_s, self._commit, present)

    def _commit(self, present: Round[_Payload]) -> None:
        fragment, version = present.fragment.index, present.version + 1
        self.rounds.publish(self._updates[fragment])
        for site, flight in self.waiting.pop((fragment, version), ()):
            site.ask(flight)
        self._begin()
