"""How fast rounds and sites are, as those before tell."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping

from fedwan.link import wire_pb2 as wire

PAST_ROUNDS = 50
"""Rounds whose times a deadline is drawn from."""
PACE_MEMORY = 0.5
"""Weight of the speeds before the latest one."""
MOST_SPEED = 1e9
"""Steps in a second; what is faster is not believed, and products of it could overflow."""


def balanced_steps(speeds: Mapping[str, float], h: int, least: int) -> dict[str, int]:
    """Steps by site: ⌊v_i / v_max H⌋ for speed v_i (Liu et al. 2024, 2401.09135, section 5).

    >>> balanced_steps({"a": 10.0, "b": 2.5, "c": 0.1}, h=20, least=2)
    {'a': 20, 'b': 5, 'c': 2}
    """
    fastest = max(speeds.values(), default=0.0)
    # A speed is measured: one that is 0.2499999 of the fastest one is a quarter of it.
    return {
        site: max(min(least, h), math.floor(h * speed / fastest + 1e-3))
        for site, speed in speeds.items()
    }


class Paces:
    """How many steps each site takes between two uploads, as its contributions' speeds tell."""

    def __init__(self, h: int, least_steps: int, num_fragments: int = 1) -> None:
        self._h = h
        self._least = least_steps
        self._is_whole = num_fragments == 1
        self.gone: Collection[str] = ()
        """Sites that were here and are not any more, to whose speed nobody is held."""
        self._speeds: dict[str, float] = {}
        self._reached: dict[str, int] = {}
        """By site, the step after which it sent last."""

    def note(self, site: str, work: wire.Work) -> None:
        """A contribution was merged; its steps and the seconds that they took are taken in.

        A fragment's seconds are those since another one left, not those of all its steps.
        """
        # Of the first one after a resume nobody knows which steps its seconds are of.
        before = self._reached.get(site, work.step)
        # It has taken no more than it contributes: a late one skips steps.
        steps = work.steps if self._is_whole else min(work.steps, work.step - before)
        self._reached[site] = work.step
        speed = steps / work.compute_s if work.compute_s > 0 else 0.0
        if 0 < speed < MOST_SPEED:
            old = self._speeds.get(site, speed)
            self._speeds[site] = PACE_MEMORY * old + (1.0 - PACE_MEMORY) * speed

    def keep(self, sites: Collection[str]) -> None:
        """Forget all others, which have gone."""
        self._speeds = {site: speed for site, speed in self._speeds.items() if site in sites}

    def of(self, site: str) -> float:
        """Steps a second of a site; infinite while nothing is known."""
        return self._speeds.get(site, math.inf)

    def usual(self) -> float:
        """Steps a second of the site in the middle; 0 while nothing is known."""
        return statistics.median(self._present().values()) if self._present() else 0.0

    def steps(self, site: str) -> int:
        """0 where the pace is the same for all, or not known yet."""
        if not self._least or site not in self._speeds:
            return 0
        speeds = self._present() | {site: self._speeds[site]}
        return balanced_steps(speeds, self._h, self._least)[site]

    def _present(self) -> dict[str, float]:
        return {site: speed for site, speed in self._speeds.items() if site not in self.gone}


class RoundTimes:
    """Of one fragment's rounds behind a barrier, in seconds from their beginning."""

    def __init__(self) -> None:
        self.past_s = deque[float](maxlen=PAST_ROUNDS)
        """When the last contribution came that was in time."""
        self._past_sent_s = deque[float](maxlen=PAST_ROUNDS)
        """When the site in the middle had announced its own."""
        self._announced_s: dict[str, tuple[int, float]] = {}
        """By site, the version of its latest contribution, and when it was announced, on the clock.
        """
        self._travels_s: dict[str, float] = {}

    def announce(self, version: int, site: str, now_s: float) -> None:
        """A site's contribution is on its way."""
        if version > self._announced_s.get(site, (-1, 0.0))[0]:
            self._announced_s[site] = (version, now_s)

    def arrive(self, version: int, site: str, now_s: float) -> None:
        """It is there, in time or not."""
        announced, at_s = self._announced_s.get(site, (-1, 0.0))
        if announced == version:
            took_s = now_s - at_s
            old_s = self._travels_s.get(site, took_s)
            self._travels_s[site] = PACE_MEMORY * old_s + (1.0 - PACE_MEMORY) * took_s

    def travel_s(self, site: str) -> float:
        """How long a site's contributions are on their way; 0 while nothing is known."""
        return self._travels_s.get(site, 0.0)

    def close(self, version: int, began_s: float, last_s: float) -> None:
        """A round has closed."""
        self.past_s.append(last_s)
        if (sent_s := self._sent_s(version)) is not None:
            self._past_sent_s.append(sent_s - began_s)

    def sent_s(self, version: int, began_s: float, now_s: float) -> float | None:
        """When the site in the middle has sent, or should; None if nothing tells."""
        if (sent_s := self._sent_s(version)) is not None:
            return sent_s
        if not self._past_sent_s:
            return None
        return max(now_s, began_s + statistics.median(self._past_sent_s))

    def _sent_s(self, version: int) -> float | None:
        at_s = [s for announced, s in self._announced_s.values() if announced == version]
        return statistics.median(at_s) if at_s else None
