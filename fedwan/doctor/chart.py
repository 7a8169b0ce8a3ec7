"""The chart: the latest figures of each site, and how a site compares with the others.

A record's `figures` keep their names (`lr/NETWORK`, `x/low`, see `fedwan.site.vitals`); beside them
are `loss/NAME`, infinite where it was not finite, `norm/NETWORK` over the median of the other
sites' latest, `agreement/` and `backward/NETWORK`. Medians, over a
site's last rounds and then over sites: one odd round, or one odd site among three, moves nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from fedwan.output.records import RoundRecord

PAST = 8
"""Values of each name that are remembered."""
FEWEST_OTHERS = 2
"""With whom a site is compared: of two sites nobody can say which one is odd."""


class Chart:
    """What is known of a run, built record by record."""

    def __init__(self) -> None:
        self.version = 0
        self._values: dict[str, dict[str, deque[float]]] = {}
        """By site and name."""
        self._first: dict[tuple[str, str], float] = {}
        """By site and name."""
        self._turns: dict[str, int] = {}
        """Contributions of each site."""
        self._seen: dict[str, int] = {}
        """By site, the most of anybody when it contributed last."""
        self._norms: dict[int, dict[str, Mapping[str, float | None]]] = {}
        """Latest norms of each site, by fragment."""
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
            self._norms.setdefault(record.fragment, {})[record.site] = record.norms
            self._turns[record.site] = self._turns.get(record.site, 0) + 1
        most = max(self._turns.values(), default=0)
        self._seen.update({record.site: most for record in records})
        for record in records:
            values = self._values.setdefault(record.site, {})
            for name, value in self._named(record).items():
                values.setdefault(name, deque(maxlen=PAST)).append(value)
                if math.isfinite(value):
                    self._first.setdefault((record.site, name), value)

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
        latest = self._norms[record.fragment].items()
        here = {*self.sites} - {record.site}
        norms = [norms.get(network) for site, norms in latest if site in here]
        others = [norm for norm in norms if norm is not None]
        mine = record.norms[network]
        if mine is None or len(others) < FEWEST_OTHERS or not statistics.median(others):
            return None
        return mine / statistics.median(others)

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
        """Median over the other sites' medians of as many rounds as they have; None of too few."""
        medians = (self._median(other, name, rounds) for other in self.sites if other != site)
        others = [median for median in medians if median is not None]
        return statistics.median(others) if len(others) >= FEWEST_OTHERS else None

    def both(self, site: str, name: str, rounds: int) -> tuple[float | None, float | None]:
        """`steady` and `typical`."""
        return self.steady(site, name, rounds), self.typical(site, name, rounds)

    def _median(self, site: str, name: str, rounds: int) -> float | None:
        key = (site, name, rounds)
        if key not in self._medians:
            past = self.past(site, name, rounds)
            self._medians[key] = statistics.median(past) if past else None
        return self._medians[key]
