"""Who takes part: sessions, silence, what sites are told to do, and who sends the first weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from fedwan.errors import SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Signals

KEPT_SESSIONS = 64
"""Of each site, that are remembered: no network holds a call back for so many of its starts."""


@dataclass
class SiteEntry:
    """What the coordinator knows of one site."""

    name: str
    session: str = ""
    """Of its present process; empty before its first Join."""
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_SESSIONS))
    """Sessions that another one has replaced: a Join of theirs that the network held back is late,
    and what it says of checkpoints is not true any more."""
    signals: Signals = field(default_factory=SimpleQueue)
    """Of its present Control stream."""
    owed: dict[int, wire.CoordinatorSignal] = field(default_factory=dict)
    """By kind, what was said and not yet acted on: said again on every new Control stream, since a
    stream that breaks may swallow it."""
    heard_s: float = 0.0
    """Time of its last heartbeat."""
    joined_s: float = 0.0
    """Time at which its present process joined."""
    step: int = 0
    joins: int = 0
    has_left: bool = False
    """Whether it said farewell in this session."""
    is_lost: bool = False
    """Whether its silence was noticed and announced."""


class Registry:
    """Sites by name, in site order. Not locked."""

    def __init__(self, names: Sequence[str], silence_s: float) -> None:
        self.sites = {name: SiteEntry(name) for name in names}
        self.rejoins = 0
        self.first = ""
        """The site that sends the initial weights."""
        self._silence_s = silence_s

    def admit(self, name: str, session: str, now_s: float) -> bool:
        """A session joins; whether it is a new one.

        A session that asks twice, since the first answer was lost on the way, is admitted once.
        """
        site = self.sites[name]
        text = f"another process of {name} has joined in place of this one"
        if session in site.replaced:
            raise SessionLost(text)
        site.heard_s = now_s
        site.has_left = site.is_lost = False
        self.first = self.first or name
        self.settle(name, wire.CoordinatorSignal.SEND_INITIAL)  # Welcome says it
        if site.session == session:
            return False
        site.signals.put(wire.CoordinatorSignal(kind=wire.CoordinatorSignal.GONE, text=text))
        site.replaced.append(site.session)
        site.session = session
        site.joined_s = now_s
        site.signals = SimpleQueue()
        site.joins += 1
        self.rejoins += site.joins > 1
        return True

    def find(self, name: str, session: str | None = None) -> SiteEntry:
        """The entry of a site that has joined; with a session only if it is the present one."""
        site = self.sites.get(name)
        if site is None or not site.session:
            raise SessionLost(f"site {name!r} has not joined this run; join first")
        if session is not None and site.session != session:
            raise SessionLost(f"this session of {name} was replaced or never joined; join again")
        return site

    def attach(self, name: str, session: str, now_s: float) -> Signals:
        """The signals for a session's new Control stream; an older stream gets no more."""
        site = self.find(name, session)
        site.signals = SimpleQueue()
        for signal in site.owed.values():
            site.signals.put(signal)
        self.hear(name, session, 0, now_s)
        return site.signals

    def hear(self, name: str, session: str, step: int, now_s: float) -> bool:
        """A heartbeat; False if it comes from a session that another one has replaced."""
        site = self.sites.get(name)
        if site is None or site.session != session:
            return False
        site.heard_s = now_s
        site.step = max(site.step, step)
        site.is_lost = False
        return True

    def drop(self, name: str, session: str, now_s: float) -> None:
        """A session's Control stream broke: if the site lives it redials at once."""
        site = self.sites.get(name)
        if site is not None and site.session == session:
            site.heard_s = min(site.heard_s, now_s - self._silence_s * 0.6)

    def live(self, now_s: float) -> list[str]:
        """Sites that have joined, have not left, and were heard lately; in site order."""
        return [
            name
            for name, site in self.sites.items()
            if self._is_here(site) and now_s - site.heard_s <= self._silence_s
        ]

    def absent(self, now_s: float) -> list[str]:
        """Sites that were here and are not any more."""
        live = self.live(now_s)
        return [name for name, site in self.sites.items() if site.joins and name not in live]

    def newly_lost(self, now_s: float) -> list[str]:
        """Sites that were here and have fallen silent since the last call."""
        lost = [
            site
            for site in self.sites.values()
            if self._is_here(site) and now_s - site.heard_s > self._silence_s
        ]
        for site in lost:
            site.is_lost = True
        return [site.name for site in lost]

    @staticmethod
    def _is_here(site: SiteEntry) -> bool:
        return bool(site.session) and not site.has_left and not site.is_lost

    def replace_first(self, lost: Sequence[str], now_s: float) -> None:
        """Ask another live site for the initial weights where the one that was to send is lost."""
        if self.first in ("", *lost):
            self.first = next(iter(self.live(now_s)), "")
            if self.first:
                self.tell(self.first, wire.CoordinatorSignal.SEND_INITIAL)

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
