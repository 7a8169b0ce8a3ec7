"""One round of one fragment: whom it waits for, and which contributions are merged next.

Behind a barrier contributions are merged in site order as they become whole, and then those that
are late for earlier rounds. On arrival one is merged: the first to be whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire


class _HasWork(Protocol):
    @property
    def work(self) -> wire.Work: ...


C = TypeVar("C", bound=_HasWork)
"""A contribution that is whole."""


class Key(NamedTuple):
    """What makes a contribution the same contribution, however often it is sent."""

    fragment: int
    version: int
    """That it started from."""
    site: str


class Merge(NamedTuple, Generic[C]):
    """A contribution that becomes part of an update."""

    key: Key
    contribution: C
    staleness: int
    """Versions between the one that it started from and the present one."""
    scale: float
    """Of its parameters' deltas."""


@dataclass
class Round(Generic[C]):
    """The present round of one fragment."""

    fragment: Fragment
    version: int
    """That it starts from."""
    began_s: float
    is_on_arrival: bool
    """Whether one contribution is enough."""
    whole: dict[tuple[int, str], C]
    """Of the fragment, by version and site, in the order in which they became whole."""
    waiting: list[str] = field(default_factory=list)
    """Sites whose contribution has not been merged, in site order."""
    merged: list[Merge[C]] = field(default_factory=list)
    last_s: float = 0.0
    """When the last contribution came that was in time, in seconds from the beginning."""
    is_closed: bool = False
    is_held: bool = False
    """Whether nothing is merged before it closes: what is may depend on all that it is given."""
    left_out: list[Key] = field(default_factory=list)
    """What it was given and is not merged."""

    @property
    def given(self) -> list[Key]:
        """Contributions that it has taken, whether they are merged or not."""
        return [*(merge.key for merge in self.merged), *self.left_out]

    @property
    def samples(self) -> int:
        """Behind what is merged."""
        return sum(merge.contribution.work.samples for merge in self.merged)

    def expect(self, awaited: Collection[str], names: Sequence[str]) -> None:
        """Until it closes, wait for these of all sites, and for whose contribution is whole."""
        if self.is_closed:
            return
        # One of an earlier version does not stand for what its site sends of this one.
        given = [key.site for key in self.given if key.version == self.version]
        self.waiting = [
            name
            for name in names
            if name not in given and (name in awaited or (self.version, name) in self.whole)
        ]

    def lacking(self) -> list[str]:
        """Sites that it waits for whose contribution is not whole."""
        return [name for name in self.waiting if (self.version, name) not in self.whole]

    def take(self, *, closes: bool) -> list[tuple[int, str]]:
        """Version and site of what is merged now, in this order; it is not waited for any more.

        While the round waits, only a site whose predecessors are all merged can be merged.
        """
        if self.is_on_arrival:
            return [next(iter(self.whole))] if closes else []
        lacking = self.lacking()
        if self.is_held and not closes:
            return []
        count = self.waiting.index(lacking[0]) if lacking and not closes else len(self.waiting)
        ready = [(self.version, name) for name in self.waiting[:count] if name not in lacking]
        self.waiting = lacking if closes else self.waiting[count:]
        return ready + sorted(key for key in self.whole if closes and key[0] < self.version)
