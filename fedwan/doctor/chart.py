"""The chart: the latest figures of each site, and how a site compares with the others.

A record's `figures` keep their names (`lr/NETWORK`, `x/low`, see `fedwan.site.vitals`); beside them
are `loss/NAME`, infinite where it was not finite, `norm/NETWORK` over the other sites' latest,
`agreement/` and `backward/NETWORK`. A round ends with fragment 0, which travels once in each; what
a site tells in it several times counts by its mean. Medians, over a site's last rounds and then
over sites: one odd round, or one odd site among three, moves nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from fedwan.output.records import RoundRecord

PAST = 8
"""Rounds that are remembered."""
FEWEST_OTHERS = 2
"""With whom a site is compared: of two sites nobody can say which one is odd."""


class Chart:
    """What is known of a run, built record by record."""

    def __init__(self) -> None:
        self.version = 0
        self._values: dict[str, dict[str, deque[float]]] = {}
        """By site and name, a value a round."""
        self._now: dict[str, dict[str, list[float]]] = {}
        """Of rounds that have not ended, by site and name."""
        self._first: dict[tuple[str, str], float] = {}
        """By site and name."""
        self._turns: dict[str, int] = {}
        """Rounds of each site."""
        self._seen: dict[str, int] = {}
        """By site, the most of anybody when its last one ended."""
        self._norms: dict[int, dict[str, RoundRecord]] = {}
        """Of each site, by fragment, what its latest norms stand in."""
        self._medians: dict[tuple[str, str, int], float | None] = {}
        """Of this round: every site is compared with every other one."""

    @property
    def sites(self) -> list[str]:
        """Those that contribute, in order: not who has left, or been let go, some rounds ago."""
        now = max(self._turns.values(), default=0)
        return sorted(site for site, seen in self._seen.items() if now - seen <= PAST)

    def take(self, records: Sequence[RoundRecord]) -> None:
        """Account for what one round merged."""
        self._medians.clear()
        for record in records:
            self.version = max(self.version, record.version)
            self._norms.setdefault(record.fragment, {})[record.site] = record
            self._turns[record.site] = self._turns.get(record.site, 0) + (record.fragment == 0)
        most = max(self._turns.values(), default=0)
        self._seen.update({record.site: most for record in records})
        for record in records:
            values = self._values.setdefault(record.site, {})
            now = self._now.setdefault(record.site, {})
            for name, value in self._named(record).items():
                now.setdefault(name, []).append(value)
            for name, told in now.items() if record.fragment == 0 else ():
                value = statistics.fmean(told)
                values.setdefault(name, deque(maxlen=PAST)).append(value)
                if math.isfinite(value):
                    self._first.setdefault((record.site, name), value)
            if record.fragment == 0:
                now.clear()

    def _named(self, record: RoundRecord) -> dict[str, float]:
        losses = {name: math.inf if x is None else x for name, x in record.losses.items()}
        norms = {network: self._relative_norm(record, network) for network in record.norms}
        of_networks: dict[str, Mapping[str, float | None]] = {
            "loss": losses,
            "norm": norms,
            "agreement": record.agreement,
            "backward": record.backward,
        }
        named: dict[str, float | None] = {**record.figures}
        for what, values in of_networks.items():
            named |= {f"{what}/{name}": value for name, value in values.items()}
        return {name: value for name, value in named.items() if value is not None}

    def _relative_norm(self, record: RoundRecord, network: str) -> float | None:
        """How many times as long as the others', or as theirs by samples, if that is less.

        Who takes more steps goes further, but not by as much.
        """
        found = self._norms[record.fragment]
        here = [found[site] for site in self.sites if site in found and site != record.site]
        pairs = [(one.norms.get(network), max(1, one.samples)) for one in [record, *here]]
        known = [(norm, samples) for norm, samples in pairs if norm is not None]
        if record.norms[network] is None or len(known) <= FEWEST_OTHERS:
            return None
        ratios = []
        for mine, *others in ([norm for norm, _ in known], [norm / num for norm, num in known]):
            typical = middle(others, mine)
            ratios += [mine / typical] if typical else []
        return min(ratios, default=None)

    def names(self, site: str, *whats: str) -> list[str]:
        """What follows `what/` in the names that a site has values of, or any where it is empty."""
        known = {name for one in ([site] if site else self._values) for name in self._values[one]}
        pairs = [(f"{what}/", name) for what in whats for name in known]
        return sorted({name.removeprefix(start) for start, name in pairs if name.startswith(start)})

    def past(self, site: str, name: str, rounds: int = PAST) -> list[float]:
        """A site's latest values, as many as are known, oldest first."""
        return list(self._values[site].get(name, ()))[-rounds:]

    def began(self, site: str, name: str) -> float:
        """The largest of the other sites' first values ever; 0 where there are none."""
        others = ((other, name) for other in self._values if other != site)
        return max((self._first[key] for key in others if key in self._first), default=0.0)

    def steady(self, site: str, name: str, rounds: int, over: int = 0) -> float | None:
        """Median of a site's last `over or rounds` values; None unless there are `rounds`."""
        known = len(self.past(site, name))
        return self._median(site, name, over or rounds) if known >= rounds else None

    def typical(self, site: str, name: str, rounds: int) -> float | None:
        """`middle` of the other sites' medians of as many rounds as they have; None of too few."""
        medians = (self._median(other, name, rounds) for other in self.sites if other != site)
        others = [median for median in medians if median is not None]
        mine = self._median(site, name, rounds)
        return middle(others, mine) if len(others) >= FEWEST_OTHERS else None

    def both(self, site: str, name: str, rounds: int) -> tuple[float | None, float | None]:
        """`steady` and `typical`."""
        return self.steady(site, name, rounds), self.typical(site, name, rounds)

    def _median(self, site: str, name: str, rounds: int) -> float | None:
        key = (site, name, rounds)
        if key not in self._medians:
            past = self.past(site, name, rounds)
            self._medians[key] = statistics.median(past) if past else None
        return self._medians[key]


def middle(others: Sequence[float], mine: float | None) -> float:
    """A median of the others': of an even number of them, the one that is nearest to `mine`.

    Of two, one may be the odd one; their mean would be nobody's.

    >>> middle([1, 100], 2), middle([1, 2], 100), middle([1, 2, 100], 50)
    (2, 2, 2)
    """
    low, high = statistics.median_low(others), statistics.median_high(others)
    return low if mine is None else min(max(mine, low), high)
