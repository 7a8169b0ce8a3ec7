"""Which sites measure quality, and whose answers belong together.

Of data that sites share any of them measures the same, so one is asked. Where each site has data of
its own all are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fedwan.protocol.limits import Report


class Answers(NamedTuple):
    """On one version."""

    reports: Mapping[str, Report]
    """By site."""
    is_shared: bool
    """One site measured on behalf of all."""


class Evaluation:
    """Asks, and collects answers."""

    def __init__(self, asks_all: bool) -> None:
        self._asks_all = asks_all
        self._asked: set[str] = set()
        """Who has not answered yet, where all are asked; else the last who was."""
        self._refused: set[str] = set()
        """Who answered with what cannot be taken, and is not asked again."""
        self._heard: dict[str, Report] = {}
        self._found: list[Answers] = []

    def choose(self, live: Sequence[str], latest: Sequence[str]) -> list[str]:
        """Whom to ask now; nobody while answers of all sites are still to come."""
        live = [name for name in live if name not in self._refused]
        if not self._asks_all:
            present = [name for name in latest if name in live] or list(live)
            self._asked = set(present[:1])
            return present[:1]
        if not self.is_idle(live):
            return []
        self._asked = set(live)
        return list(live)

    def is_idle(self, live: Collection[str]) -> bool:
        """Whether no answer is to be expected without asking again."""
        return not self._asked & set(live)

    def hear(self, site: str, report: Report | None) -> None:
        """Take an answer, or that one was refused; `Registry.answer` knows who was asked."""
        if report is None:
            self._asked.discard(site)
            self._refused.add(site)
        elif not self._asks_all or not report.version:
            self._found.append(Answers({site: report}, is_shared=True))
        elif site in self._asked:
            self._asked.discard(site)
            self._heard[site] = report

    def found(self, live: Collection[str]) -> list[Answers]:
        """What is complete since the last call; the dead are not waited for."""
        if self._heard and self.is_idle(live):
            self._found.append(Answers(self._heard, is_shared=False))
            self._heard = {}
        found, self._found = self._found, []
        return found
