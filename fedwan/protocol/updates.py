"""Updates that sites can have, by fragment.

Where sites can be left behind, past updates of a fragment are kept as long as they weigh no more
than it does; else the newest one, until its round closes or all hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

from fedwan.fragments import Fragment


class _HasBytes(Protocol):
    @property
    def num_bytes(self) -> int: ...


U = TypeVar("U", bound=_HasBytes)


class Updates(Generic[U]):
    """What is held of each fragment, by version."""

    def __init__(self, fragments: Sequence[Fragment], *, keeps_past: bool) -> None:
        self.keeps_past = keeps_past
        self._most = [fragment.num_bytes if keeps_past else 0 for fragment in fragments]
        self._held: list[dict[int, U]] = [{} for _ in fragments]
        self._holders: list[set[str]] = [set() for _ in fragments]
        """Sites that are known to hold the newest one."""

    def put(self, fragment: int, version: int, update: U) -> None:
        """Hold the newest one, and let go of the oldest that weigh too much."""
        held = self._held[fragment]
        held[version] = update
        total = sum(kept.num_bytes for kept in held.values())
        while len(held) > 1 and total > self._most[fragment]:
            total -= held.pop(next(iter(held))).num_bytes
        self._holders[fragment].clear()

    def get(self, fragment: int, version: int) -> U | None:
        """The one that leads to this version, if it is held."""
        return self._held[fragment].get(version)

    def note_holder(self, fragment: int, version: int, site: str, awaited: Collection[str]) -> None:
        """A site has an update; once all that are awaited do, its memory is free to go."""
        if version == next(reversed(self._held[fragment]), None):
            self._holders[fragment].add(site)
            if not self.keeps_past and self._holders[fragment].issuperset(awaited):
                del self._held[fragment][version]

    def holds_newest(self, fragment: int, site: str) -> bool:
        """Whether a site is known to have the newest one, which may be gone since."""
        return site in self._holders[fragment]

    def forget_holder(self, site: str) -> None:
        """Its process is a new one."""
        for holders in self._holders:
            holders.discard(site)

    def close(self, fragment: int) -> None:
        """A round has closed: who still wants the update before it takes the global weights."""
        if not self.keeps_past:
            self._held[fragment].clear()

    def lead(self, versions: Sequence[int], present: Sequence[int]) -> bool:
        """Whether those that are held lead a site from its versions to the present ones."""
        return len(versions) == len(present) and all(
            version <= now <= version + len(held)
            and all(at in held for at in range(version + 1, now + 1))
            for version, now, held in zip(versions, present, self._held, strict=True)
        )
