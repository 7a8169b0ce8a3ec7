"""A site in virtual time: what it is like, its lines, how it fails and returns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedwan.fragments import Fragment, due_step
from fedwan.planner.clock import Clock
from fedwan.planner.loads import Load
from fedwan.planner.virtual_line import Line
from fedwan.planner.weather import Outage, Season

__all__ = ["UNKNOWN", "Hub", "SiteModel", "Timetable", "VirtualSite"]

UNKNOWN = math.inf
"""A time that is not known yet."""


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
    num_live: int
    """Sites that are there."""


class VirtualSite(ABC):
    """One site's way through the run: what all kinds have in common.

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
        self.steps_taken = 0
        """Those that were lost count too."""
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
        self._up = Line([(season.from_s, season.link.up) for season in model.seasons])
        self._down = Line([(season.from_s, season.link.down) for season in model.seasons])
        self._step = 0
        self._stretch_ends_s = 0.0
        self._hub = hub
        clock.at(0.0, self._go_on, 0)
        for outage in model.outages:
            clock.at(outage.from_s, self._die)
            clock.at(outage.until_s, self._come_back)

    @abstractmethod
    def _go_on(self, epoch: int) -> None:
        """What it waited for is here, or it begins."""

    @abstractmethod
    def _drop(self) -> None:
        """What was on its way is void."""

    @abstractmethod
    def _place(self, versions: tuple[int, ...]) -> None:
        """It has global weights of these versions, and goes on from there."""

    def _take_steps(self, count: int, now_s: float) -> None:
        """Step so many times."""
        walked_s = count * self._model.step_s
        self._step += count
        self.steps_taken += count
        self.compute_s += walked_s
        self._stretch_ends_s = now_s + walked_s

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
        self.epoch += 1
        self._drop()
        self.compute_s -= max(0.0, self._stretch_ends_s - self._clock.now_s)
        self._stretch_ends_s = self._clock.now_s

    def start_over(self) -> None:
        """It joins again, or was told that what it contributes to is past: global weights."""
        self._void()
        self.rejoins += 1
        now_s = self._clock.now_s
        # What it had queued is gone with its connections.
        for line in (self._up, self._down):
            line.free_at_s = min(line.free_at_s, now_s)
        rtt_s = self._down.pipe_at(now_s).rtt_s
        here_s = self._down.carry(self._table.global_bytes, now_s + rtt_s)
        self.bytes_down += self._table.global_bytes
        self._clock.at(here_s, self._adopt, tuple(self._hub.versions), self.epoch)

    def _adopt(self, versions: tuple[int, ...], epoch: int) -> None:
        if epoch == self.epoch:
            self._place(versions)
            self._go_on(epoch)
