"""Who takes part: sessions, heartbeats, and a word in each site's ear."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from fedwan.errors import SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Signals

__all__ = ["Registry", "SiteEntry"]


@dataclass
class SiteEntry:
    """What the coordinator knows of one site."""

    name: str
    session: str = ""
    """Of its present process; empty before its first Join."""
    signals: Signals = field(default_factory=SimpleQueue)
    """Of its present Control stream."""
    owed: dict[int, wire.CoordinatorSignal] = field(default_factory=dict)
    """By kind, what was said and not yet acted on: said again on every new Control stream, since a
    stream that breaks may swallow it."""
    heard_s: float = 0.0
    """Monotonic time of its last heartbeat."""
    step: int = 0
    joins: int = 0
    has_left: bool = False
    """Whether it said farewell in this session."""
    is_lost: bool = False
    """Whether its silence was noticed and announced."""


class Registry:
    """Sites by name, in site order. Not locked: the engine holds its lock around every call.

    Args:
        names: the sites of the run, in merge order.
        silence_s: a site not heard for so long counts as lost.
        clock: monotonic seconds.
    """

    def __init__(
        self, names: Sequence[str], silence_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sites = {name: SiteEntry(name) for name in names}
        self._silence_s = silence_s
        self._clock = clock

    def admit(self, name: str, session: str) -> bool:
        """A session joins; whether the site had been here before, in another one.

        A session that asks twice, since the first answer was lost on the way, is admitted once.
        """
        site = self.sites[name]
        site.heard_s = self._clock()
        site.has_left = site.is_lost = False
        if site.session != session:
            text = f"another process of {name} has joined in place of this one"
            site.signals.put(wire.CoordinatorSignal(kind=wire.CoordinatorSignal.GONE, text=text))
            site.session = session
            site.signals = SimpleQueue()
            site.joins += 1
        return site.joins > 1

    def find(self, name: str, session: str | None = None) -> SiteEntry:
        """The entry of a site that has joined.

        Args:
            name: of the site.
            session: that it must be in; None for any.

        Raises:
            SessionLost: it is not of this run, has not joined, or is in another session.
        """
        site = self.sites.get(name)
        if site is None or not site.session:
            raise SessionLost(f"site {name!r} has not joined this run; join first")
        if session is not None and site.session != session:
            raise SessionLost(f"this session of {name} was replaced or never joined; join again")
        return site

    def attach(self, name: str, session: str) -> Signals:
        """The signals for a session's new Control stream; an older stream gets no more.

        Raises:
            SessionLost: see `find`.
        """
        site = self.find(name, session)
        site.signals = SimpleQueue()
        for signal in site.owed.values():
            site.signals.put(signal)
        self.hear(name, session, 0)
        return site.signals

    def hear(self, name: str, session: str, step: int) -> bool:
        """A heartbeat; False if it comes from a session that another one has replaced."""
        site = self.sites.get(name)
        if site is None or site.session != session:
            return False
        site.heard_s = self._clock()
        site.step = max(site.step, step)
        site.is_lost = False
        return True

    def is_live(self, name: str) -> bool:
        """Whether the site has joined, has not left, and was heard lately."""
        site = self.sites[name]
        is_silent = self._clock() - site.heard_s > self._silence_s
        return bool(site.session) and not site.has_left and not site.is_lost and not is_silent

    def live(self) -> list[str]:
        """Names of the live sites, in site order."""
        return [name for name in self.sites if self.is_live(name)]

    def newly_lost(self) -> list[str]:
        """Sites that were here and have fallen silent since the last call."""
        lost = [
            site
            for site in self.sites.values()
            if site.session
            and not site.has_left
            and not site.is_lost
            and self._clock() - site.heard_s > self._silence_s
        ]
        for site in lost:
            site.is_lost = True
        return [site.name for site in lost]

    def drop(self, name: str, session: str) -> None:
        """A session's Control stream broke: if the site lives it redials at once."""
        site = self.sites.get(name)
        if site is not None and site.session == session:
            site.heard_s = min(site.heard_s, self._clock() - self._silence_s * 0.6)

    def tell(
        self,
        name: str,
        kind: wire.CoordinatorSignal.Kind,
        text: str = "",
        is_complete: bool = False,
    ) -> None:
        """Say something to a site, until `settle` says that it was acted on."""
        signal = wire.CoordinatorSignal(kind=kind, text=text, is_complete=is_complete)
        self.sites[name].owed[kind] = signal
        self.sites[name].signals.put(signal)

    def settle(self, name: str, kind: wire.CoordinatorSignal.Kind) -> None:
        """A site did what a signal asks for."""
        self.sites[name].owed.pop(kind, None)
