"""Who takes part: sessions, silence, what sites are told to do, and who sends the first weights.

The operator may have a site leave. One that is drained leaves once what it was sending is here or
is not coming any more; one that is ejected is out at once. Nobody waits for a site that is admitted
again before it joins, unless the run needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fedwan.errors import (
    FedwanError,
    NotJoined,
    PayloadError,
    SessionLost,
    SiteDrained,
    SiteEjected,
)
from fedwan.link import wire_pb2 as wire

KEPT_SESSIONS = 64
"""Of each site, that are remembered: no network holds a call back for so many of its starts."""

_CUT = 0.6
"""Of the silence that counts, once a site's stream is broken."""

Verb = Literal["admit", "drain", "eject"]
"""What the operator decides of a site."""
DECIDED: dict[Verb, str] = {"admit": "admitted", "drain": "drained", "eject": "ejected"}
"""The event that tells of it."""


class Outbox(Protocol):
    """Takes what is said to a site, and sends it in that order."""

    def put(self, signal: wire.CoordinatorSignal, /) -> object:
        """The next one."""


@dataclass
class SiteEntry:
    """What the coordinator knows of one site."""

    name: str
    session: str = ""
    """Of its present process; empty before its first Join."""
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_SESSIONS))
    """Sessions that another one has replaced: a Join of theirs that the network held back is late,
    and what it says of checkpoints is not true any more."""
    outbox: Outbox | None = None
    """Of its present process's Control stream; None before there is one."""
    owed: dict[int, wire.CoordinatorSignal] = field(default_factory=dict)
    """By kind, what was said and not yet acted on: said again on every new Control stream, since a
    stream that breaks may swallow it."""
    heard_s: float = 0.0
    """Time of its last heartbeat; 0 before its first Join."""
    is_cut: bool = False
    """Whether its Control stream broke after that."""
    joined_s: float = 0.0
    step: int = 0
    joins: int = 0
    checkpoint: int | None = None
    """Version of the newest one of a process that has joined, until it is heard to go on."""
    lives_on: bool = False
    """Whether its process is the one that an earlier start of the coordinator knew."""
    lost: int = -1
    """The last version before which its steps could not be taken again."""
    has_left: bool = False
    """Whether it said farewell in this session."""
    is_lost: bool = False
    """Whether its silence was noticed and announced."""
    standing: Literal["in", "draining", "drained", "ejected"] = "in"
    """As the operator decided."""
    sending: frozenset[object] = frozenset()
    """While it drains: what is still waited for."""
    is_awaited: bool = True
    """Not between being admitted again and its Join."""
    version: int = 0
    """That it was last given."""
    reported: int = -1
    """Version that it last told the quality of."""
    has_told_earlier: bool = False
    """Whether it has told the quality of an earlier version than it was asked for since then."""


class Registry:
    """Sites by name, in site order. Not locked."""

    def __init__(self, names: Sequence[str], silence_s: float) -> None:
        self.sites = {name: SiteEntry(name) for name in names}
        self.rejoins = 0
        self.least = 1
        """Sites that the run cannot do without."""
        self.first = ""
        """The site that sends the initial weights."""
        self.opener = ""
        """Whose initial weights were taken, until it has told how good they are."""
        self.moved_s = 0.0
        """When a site was last heard to have come to a further step."""
        self._silence_s = silence_s

    def admit(self, name: str, session: str, now_s: float) -> bool:
        """A session joins; whether it is a new one.

        A session that asks twice, since the first answer was lost on the way, is admitted once; one
        that has left does not come back.
        """
        site = self.sites[name]
        text = f"another process of {name} has joined in place of this one"
        if session in site.replaced:
            raise SessionLost(text)
        if site.has_left and session == site.session:
            raise SessionLost(f"this process of {name} has left the run")
        site.heard_s, site.is_cut = now_s, False
        site.has_left = site.is_lost = False
        site.is_awaited = True
        self.first = self.first or name
        self.settle(name, wire.CoordinatorSignal.SEND_INITIAL)  # Welcome says it
        if site.session == session:
            return False
        if site.outbox is not None:
            site.outbox.put(wire.CoordinatorSignal(kind=wire.CoordinatorSignal.GONE, text=text))
        site.replaced.append(site.session)
        site.session = session
        site.joined_s = now_s
        site.outbox = None
        site.joins += 1
        self.rejoins += site.joins > 1
        return True

    def find(self, name: str, session: str | None = None) -> SiteEntry:
        """The entry of a site that has joined; with a session only if it is the present one."""
        if session is None:
            self.check(name)
        # To a session of another run nothing is said that would end its site for good.
        site = self.sites.get(name)
        if site is None or not site.session:
            raise NotJoined(f"site {name!r} has not joined this run; join first")
        if session is not None and site.session != session:
            raise SessionLost(f"this session of {name} was replaced or never joined; join again")
        self.check(name)
        return site

    def attach(self, name: str, session: str, outbox: Outbox, now_s: float) -> None:
        """What is said goes to a session's new Control stream; an older stream gets no more."""
        site = self.find(name, session)
        site.outbox = outbox
        for signal in site.owed.values():
            outbox.put(signal)
        self.hear(name, session, 0, now_s)

    def hear(self, name: str, session: str, step: int, now_s: float) -> None:
        """A heartbeat; nothing if it comes from a session that another one has replaced."""
        site = self.sites.get(name)
        if site is not None and site.session == session:
            site.heard_s, site.is_cut = now_s, False
            if step > site.step:
                site.step, self.moved_s = step, now_s

    def drop(self, name: str, session: str) -> None:
        """A session's Control stream broke: if the site lives it redials at once."""
        site = self.sites.get(name)
        if site is not None and site.session == session:
            site.is_cut = True

    def excuse(self, seconds: float, now_s: float) -> None:
        """For so long nobody could be heard here, until now: who was not silent before is not."""
        for site in self.sites.values():
            if site.session and not self._is_silent(site, now_s - seconds):
                site.heard_s = min(now_s, site.heard_s + seconds)

    def live(self, now_s: float) -> list[str]:
        """Sites that have joined, have not left, and were heard lately; in site order."""
        return [
            name
            for name, site in self.sites.items()
            if site.session and not site.has_left and not self._is_silent(site, now_s)
        ]

    def absent(self, now_s: float) -> list[str]:
        """Sites that were here and are not any more."""
        live = {*self.live(now_s)}
        return [name for name, site in self.sites.items() if site.joins and name not in live]

    def notice(self, now_s: float) -> tuple[list[str], list[str]]:
        """Sites that have fallen silent since the last call, and those that are heard again."""
        lost: list[str] = []
        returned: list[str] = []
        for name, site in self.sites.items():
            is_lost = self._is_silent(site, now_s)
            if site.session and not site.has_left and site.is_lost != is_lost:
                site.is_lost = is_lost
                (lost if is_lost else returned).append(name)
        return lost, returned

    def _is_silent(self, site: SiteEntry, now_s: float) -> bool:
        return now_s - site.heard_s > self._silence_s * (_CUT if site.is_cut else 1.0)

    # Membership ----------------------------------------------------------------------------

    def state_of(self, name: str, now_s: float, is_awaited: bool, is_sending: bool) -> str:
        """In a word."""
        site = self.sites[name]
        if site.standing != "in":
            return site.standing
        if site.has_left:
            return "left"
        if not site.session:
            return "expected"
        if self._is_silent(site, now_s):
            return "silent"
        if is_sending:
            return "contributing"
        return "training" if is_awaited else "waiting"

    def refusal(self, name: str) -> FedwanError | None:
        """What a site is told that the operator had leave."""
        standing = self.sites[name].standing if name in self.sites else "in"
        mend = f"`fedwan sites RUN admit {name}` at the coordinator takes it back"
        if standing == "drained":
            return SiteDrained(f"{name} was drained and has left the run in order; {mend}")
        if standing == "ejected":
            return SiteEjected(f"{name} was ejected from the run; {mend}")
        return None

    def check(self, name: str) -> None:
        """Raise it."""
        if (refusal := self.refusal(name)) is not None:
            raise refusal

    def admitted(self) -> list[str]:
        """Sites that may take part."""
        return [n for n, site in self.sites.items() if site.standing in ("in", "draining")]

    def awaited(self) -> list[str]:
        """Sites that rounds wait for.

        Those that have joined, or all others too if the run needs them: a coordinator that starts
        again takes a site whose drain was taken back for one that has yet to join, and a round that
        waits for nobody would close with nothing.
        """
        admitted = self.admitted()
        joined = [name for name in admitted if self.sites[name].is_awaited]
        return next((n for n in (joined, admitted) if len(n) >= self.least), [*self.sites])

    def objection(self, verb: Verb, name: str) -> str:
        """Why a decision cannot be; nothing if it can."""
        if name not in self.sites:
            return (
                f"site {name!r} is not in this run, which has {', '.join(self.sites)}; a new one "
                "is added to `sites` of the stopped run's file, then --resume"
            )
        standing = self.sites[name].standing
        if verb == "admit":
            return f"{name} is in the run already" if standing == "in" else ""
        if standing == "ejected" or (verb == "drain" and standing != "in"):
            return f"{name} is {standing} already; admit it if it shall take part again"
        left = sum(n != name and self.sites[n].standing == "in" for n in self.awaited())
        if left >= self.least:
            return ""
        if left:
            return (
                f"without {name} there are {left} sites, and {self.least} take the masks off a "
                "sum; admit another one first, or begin a run with round.quorum"
            )
        return (
            f"{name} is the last site that the run waits for, which would wait for ever; "
            "admit another one first, or stop the run"
        )

    def decide(self, verb: Verb, name: str, sending: Collection[object], has_begun: bool) -> None:
        """The operator has decided; `sending`: what is on its way in from the site."""
        site = self.sites[name]
        if verb == "admit":
            if site.standing != "draining":
                # Its process may not know yet that it was to leave: it must join again, too.
                site.is_awaited = not has_begun
                site.replaced.append(site.session)
                site.session = ""
            site.standing, site.has_left = "in", False
        elif verb == "drain":
            site.standing, site.sending = "draining", frozenset(sending)
        else:
            site.standing, site.has_left = "ejected", True

    def release(self, sending: Collection[object]) -> list[str]:
        """Let those go that drain and have sent what they were sending, or will not."""
        done = [
            site
            for site in self.sites.values()
            if site.standing == "draining"
            and (site.is_lost or site.has_left or site.sending.isdisjoint(sending))
        ]
        for site in done:
            site.standing, site.has_left = "drained", True
        return [site.name for site in done]

    def replace_first(self, lost: Sequence[str], now_s: float) -> None:
        """Ask another live site for the initial weights where the one that was to send is lost.

        Or was asked, and has not: then it is among `lost`, too.
        """
        first = self.sites.get(self.first)
        if first is None or first.name in lost or first.has_left or not first.session:
            self.first = next((name for name in self.live(now_s) if name not in lost), "")
            if self.first:
                self.tell(self.first, wire.CoordinatorSignal.SEND_INITIAL)

    def tell(
        self,
        name: str,
        kind: wire.CoordinatorSignal.Kind,
        text: str = "",
        is_complete: bool = False,
        version: int = 0,
    ) -> None:
        """Say something to a site, until `settle` says that it was acted on."""
        of = wire.CoordinatorSignal
        signal = of(kind=kind, text=text, is_complete=is_complete, version=version)
        site = self.sites[name]
        site.has_told_earlier &= kind != of.EVALUATE
        site.owed[kind] = signal
        if site.outbox is not None:
            site.outbox.put(signal)

    def answer(self, name: str, version: int) -> bool:
        """Take a report on a version; False if it was heard before, or one like it.

        Raises:
            PayloadError: nobody asked for it. Initial weights are measured unasked, by the site
                that sent them.
        """
        site = self.find(name)
        is_first = version == 0 and name == self.opener
        asked = site.owed.get(wire.CoordinatorSignal.EVALUATE)
        if not is_first and asked is None:
            if site.reported == version:
                return False
            raise PayloadError(f"report on version {version}, for which nobody asked {name}")
        if is_first:
            self.opener = ""
        elif asked is not None and version >= asked.version:
            self.settle(name, wire.CoordinatorSignal.EVALUATE)
        elif site.has_told_earlier:
            return False
        else:  # asked before this time, maybe: it is waited for still
            site.has_told_earlier = True
        site.reported = version
        return True

    def settle(self, name: str, kind: wire.CoordinatorSignal.Kind) -> None:
        """A site did what a signal asks for."""
        self.sites[name].owed.pop(kind, None)
