"""Which sites measure quality, and whose answers belong together.

Of data that sites share any of them measures the same, so one is asked; now and then, and at the
end, another one too, which tells whether the first one lies. Where that is not known, of a script,
it is always the same one, while it is there. Where each site has data of its own all are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedwan.protocol.limits import Report

PAIR_EVERY = 4
"""Evaluations, of which one is by two sites: each costs the weights once more, and seconds."""
MOST_MISSED = 3
"""Evaluations, after which those of the sites that have answered are taken."""


class Evaluation:
    """Asks, and collects answers."""

    def __init__(self, asks_all: bool, pairs: bool = False) -> None:
        self.asks_all = asks_all
        """Whether each site has data of its own."""
        self.pairs = pairs
        """Whether sites measure the same, so that two are asked now and then."""
        self._last = ""
        """Who was asked last: what others measure may not be comparable."""
        self._num_chosen = 0
        """Evaluations that one site was asked for, or two."""
        self._asked: set[str] = set()
        """Who has not answered yet."""
        self._refused: set[str] = set()
        """Who answers with what cannot be taken, or not at all, and is not asked again."""
        self._missed = 0
        """Evaluations that were left out, since answers to the one before were still to come."""
        self._heard: dict[str, Report] = {}
        self._found: list[Mapping[str, Report]] = []

    def choose(
        self, live: Sequence[str], latest: Sequence[str], *, is_last: bool = False
    ) -> list[str]:
        """Whom to ask now; nobody while answers of all sites are still to come."""
        chosen = [name for name in live if name not in self._refused]
        if not self.asks_all:
            # Who has not answered the last question may not answer this one.
            chosen = [name for name in chosen if name not in self._asked] or chosen
            here = [name for name in latest if name in chosen]
            is_pair = self.pairs and (is_last or not self._num_chosen % PAIR_EVERY)
            self._num_chosen += bool(chosen)
            if self._last in chosen and not self.pairs:
                here = [self._last]
            chosen = [*here, *(n for n in chosen if n not in here)][: 1 + is_pair]
            self._last = chosen[0] if chosen else self._last
        elif not self.is_idle(chosen):
            self._missed += 1
            if self._missed < MOST_MISSED:
                return []
            self._refused |= self._asked & set(chosen)
            if self._heard:
                self._found.append(self._heard)
                self._heard = {}
            chosen = [name for name in chosen if name not in self._asked]
        self._asked, self._missed = set(chosen), 0
        return chosen

    def is_idle(self, live: Collection[str]) -> bool:
        """Whether no answer is to be expected without asking again."""
        return not (self._found or self._asked & set(live))

    def hear(self, site: str, report: Report | None) -> None:
        """Take an answer, or that one was refused; `Registry.answer` knows who was asked."""
        if report is None:
            self._asked.discard(site)
            self._refused.add(site)
        elif not self.asks_all or not report.version:
            self._asked.discard(site)
            self._found.append({site: report})
        elif site in self._asked:
            self._asked.discard(site)
            self._heard[site] = report

    def found(self, live: Collection[str]) -> list[Mapping[str, Report]]:
        """What is complete since the last call, by site; the dead are not waited for."""
        if self._heard and self.is_idle(live):
            self._found.append(self._heard)
            self._heard = {}
        found, self._found = self._found, []
        return found
