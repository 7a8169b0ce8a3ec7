"""A site at a pace of its own: it steps as often as it is told, sends, fetches what came meanwhile.

The order of things is that of `fedwan.site.own_pace` and `push_pull`: it asks for the next update,
sends its contribution, and fetches updates one after the other until that is in them; where updates
are held no longer it takes the whole weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from fedwan.planner.clock import Clock
from fedwan.planner.virtual_site import UNKNOWN, Hub, SiteModel, Timetable, VirtualSite

__all__ = ["Answer", "OwnPaceHub", "OwnPaceJourney"]


class Answer(NamedTuple):
    """What a site that asks for an update is told."""

    version: int
    """That it has once this is here."""
    num_bytes: int
    is_merged: bool
    """Whether this brings what its contribution became part of."""
    steps: int
    """To take until its next upload."""


class OwnPaceHub(Hub, Protocol):
    """What a site sees of a coordinator that leaves it its pace."""

    def arrive(self, site: OwnPaceJourney, version: int, epoch: int) -> None:
        """A contribution that started from this version is whole and checked."""
        ...

    def want(self, site: OwnPaceJourney, epoch: int) -> None:
        """The site asks for the update after its version; the answer comes when it is there."""
        ...


class OwnPaceJourney(VirtualSite):
    """See `VirtualSite`; one fragment, one contribution at a time."""

    def __init__(
        self, index: int, model: SiteModel, table: Timetable, clock: Clock, hub: OwnPaceHub
    ) -> None:
        super().__init__(index, model, table, clock, hub)
        self._desk = hub
        (self._load,) = table.loads
        self.version = 0
        """Of the global weights that it has."""
        self.steps_sent = 0
        """That its latest contribution is made of."""
        self.sent_from = 0
        """Version that it started from."""
        self.step_s = model.step_s
        self._steps = table.h

    def _go_on(self, epoch: int) -> None:
        """See `VirtualSite`."""
        if epoch != self.epoch:
            return
        now_s, before = self._clock.now_s, self._step
        self._take_steps(self._steps, now_s)
        self._mark(before, now_s)
        self._clock.at(self._stretch_ends_s, self._depart, epoch)

    def _mark(self, before: int, now_s: float) -> None:
        """Note the rounds' starts among the steps that are taken next."""
        h = self._table.h
        for index in range(-(-before // h), -(-self._step // h)):
            if index >= len(self.marks):
                self.marks.append(math.nan)  # it takes more than its share of the run's steps
            self.marks[index] = now_s + (index * h - before) * self._model.step_s

    def _depart(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        load = self._load
        self.steps_sent, self.sent_from = self._steps, self.version
        coded_s = self._clock.now_s + load.encode_s
        half_trip_s = self._up.pipe_at(coded_s).rtt_s / 2
        self._clock.at(coded_s + half_trip_s, self._desk.want, self, epoch)
        whole_s = self._up.carry(load.up_bytes, coded_s) + load.check_s
        self.bytes_up += load.up_bytes
        self._clock.at(whole_s, self._desk.arrive, self, self.version, epoch)

    def tell(self, answer: Answer) -> None:
        """The coordinator answers."""
        now_s = self._clock.now_s
        if answer.version > self.version + 1:  # told that updates are gone, it asks for the weights
            now_s += self._down.pipe_at(now_s).rtt_s
        here_s = self._down.carry(answer.num_bytes, now_s) + self._load.apply_s
        self.bytes_down += answer.num_bytes
        self._clock.at(here_s, self._take, answer, self.epoch)

    def _take(self, answer: Answer, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self.version, self._steps = answer.version, answer.steps
        now_s = self._clock.now_s
        if answer.is_merged:
            self._clock.at(now_s + self._load.land_s, self._go_on, epoch)
        else:
            half_trip_s = self._up.pipe_at(now_s).rtt_s / 2
            self._clock.at(now_s + half_trip_s, self._desk.want, self, epoch)

    def end(self) -> None:
        """The run is over: it takes the final weights."""
        if self.ended_s != UNKNOWN:
            return
        self._void()
        now_s = self._clock.now_s
        told_s = now_s + self._down.pipe_at(now_s).rtt_s
        self.ended_s = self._down.carry(self._table.global_bytes, told_s)

    def _drop(self) -> None:
        """See `VirtualSite`."""

    def _place(self, versions: tuple[int, ...]) -> None:
        """See `VirtualSite`."""
        (self.version,) = versions
