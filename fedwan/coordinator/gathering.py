"""Gathering: what becomes of the contributions to one update, until the policy closes its round.

Behind a barrier contributions are merged in site order as they become whole, and then those that
are late for earlier rounds. On arrival, one is merged: the first to be whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedwan.coordinator.intake import Contribution, Key
from fedwan.coordinator.merge import Merger
from fedwan.coordinator.policy import Verdict
from fedwan.coordinator.servicer import Servicer
from fedwan.doctor.sampling import Sample
from fedwan.fragments import Fragment
from fedwan.state import State
from fedwan.strategy import Strategy

__all__ = ["Gathering", "Merged", "Round"]


class Merged(NamedTuple):
    """A contribution that is part of an update."""

    contribution: Contribution
    start: int
    """The version that it started from."""
    staleness: int
    """Versions between that and the present one."""
    sample: Sample
    """Of its values."""


class Round(NamedTuple):
    """Which round it is."""

    fragment: Fragment
    version: int
    """That it starts from."""
    past_s: Sequence[float]
    """Of past rounds, when the last contribution came that was in time."""


class Gathering:
    """One round of one fragment.

    Args:
        servicer: where contributions lie.
        strategy: says how they are coded, and when the round closes.
        merger: the fragment's.
        site_names: in merge order.
        nominal: samples; a contribution of as many has weight 1.
        round_: which it is.
    """

    def __init__(
        self,
        servicer: Servicer,
        strategy: Strategy,
        merger: Merger,
        site_names: Sequence[str],
        nominal: int,
        round_: Round,
    ) -> None:
        self.waiting = list(site_names)
        """Sites whose contribution has not been merged, in site order."""
        self.merged: list[Merged] = []
        self.last_s = 0.0
        """When the last contribution came that was in time, in seconds from the beginning."""
        self._servicer = servicer
        self._policy = strategy.policy
        self._up = strategy.up
        self._merger = merger
        self._nominal = nominal
        self._num_sites = len(site_names)
        self._fragment, self._version, self._past_s = round_
        self._began = time.monotonic()
        self._num_seen = 0

    @property
    def is_on_arrival(self) -> bool:
        """Whether one contribution is enough."""
        return self._policy.is_on_arrival(self._version)

    def advance(self, state: State, tidy: Callable[[], object]) -> Verdict:
        """Merge what is here as far as the order allows; what the policy says.

        Args:
            state: the global state, whose running statistics one contribution must not replace.
            tidy: called after each contribution.
        """
        elapsed_s = time.monotonic() - self._began
        with self._servicer.changed:
            whole = self._servicer.intake.whole(self._fragment.index)
            num_live = len(self._servicer.registry.live())
        if self.is_on_arrival:
            verdict = self._decide(len(whole), elapsed_s, num_live)
            if verdict == "close":
                if self._num_sites > 1:
                    self._merger.keep(state, self._num_sites - 1.0)
                self._add(*whole[0])
            return verdict
        ready = {
            key.site: (key, contribution)
            for key, contribution in whole
            if key.version == self._version and key.site in self.waiting
        }
        num_arrived = len(self.merged) + len(ready)
        if num_arrived > self._num_seen:
            self._num_seen, self.last_s = num_arrived, elapsed_s
        verdict = self._decide(num_arrived, elapsed_s, num_live)
        # While waiting, only a site whose predecessors are all merged can be merged.
        for name in list(self.waiting):
            if name in ready:
                self._add(*ready[name])
                self.waiting.remove(name)
                tidy()
            elif verdict == "wait":
                break
        if verdict == "close":
            late = [item for item in whole if item[0].version < self._version]
            for key, contribution in sorted(late, key=lambda item: (item[0].version, item[0].site)):
                self._add(key, contribution)
                tidy()
        return verdict

    def _decide(self, num_arrived: int, elapsed_s: float, num_live: int) -> Verdict:
        return self._policy.decide(num_arrived, elapsed_s, self._past_s, self._version, num_live)

    def _add(self, key: Key, contribution: Contribution) -> None:
        staleness = max(0, self._version - key.version)
        sample = self._merger.add(
            self._up.read_each(contribution.payload, self._fragment.layout),
            contribution.work.samples / self._nominal,
            self._policy.scale(staleness),
        )
        self.merged.append(Merged(contribution, key.version, staleness, sample))

    def is_idle(self) -> bool:
        """Whether nothing is here that could be merged; the servicer's lock is held."""
        whole = self._servicer.intake.whole(self._fragment.index)
        if self.is_on_arrival:
            return not whole
        first = self.waiting[:1]
        return not any(key.version == self._version and key.site in first for key, _ in whole)

    def missing(self) -> list[str]:
        """Sites that were here, are not any more, and are waited for; the lock is held."""
        registry = self._servicer.registry
        return [n for n in self.waiting if registry.sites[n].joins and not registry.is_live(n)]

    def owing(self) -> list[str]:
        """Sites without which the round could not close; the servicer's lock is held."""
        registry = self._servicer.registry
        absent = [n for n in self.waiting if not registry.is_live(n)]
        return absent if absent and self.is_on_arrival else self.waiting

    def starts(self) -> list[tuple[str, int]]:
        """The sites that took part, each with the version that its contribution started from.

        A site can be named twice: with a late contribution, and with one that came in time.
        """
        return [(m.contribution.site, m.start) for m in self.merged]
