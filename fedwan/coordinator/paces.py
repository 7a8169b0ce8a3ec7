"""How many steps each site takes between two uploads, by its measured speed.

Dynamic local updates (Liu et al. 2024, 2401.09135, section 5): a site of speed v_i takes
⌊v_i / v_max H⌋ steps, so that slow and fast sites need about the same time for a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedwan.link import wire_pb2 as wire

__all__ = ["Paces", "balanced_steps"]

MEMORY = 0.5
"""Weight of the speeds before the latest one."""


def balanced_steps(speeds: Mapping[str, float], h: int, least: int) -> dict[str, int]:
    """Steps by site.

    Args:
        speeds: in steps per second, above 0.
        h: of the fastest site.
        least: of any site.

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
    """The sites' speeds, as their contributions tell.

    Args:
        site_names: of the run.
        h: steps of the fastest site.
        least_steps: of any site; 0 leaves H to all of them.
    """

    def __init__(self, site_names: Sequence[str], h: int, least_steps: int) -> None:
        self._h = h
        self._least = least_steps
        self._speeds: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._known = set(site_names)

    def note(self, site: str, work: wire.Work) -> None:
        """A contribution came; its steps and the seconds that they took are taken in."""
        if site not in self._known or not work.steps or not work.compute_s > 0:
            return
        speed = work.steps / work.compute_s
        if math.isfinite(speed) and speed > 0:
            old = self._speeds.get(site)
            new = speed if old is None else MEMORY * old + (1.0 - MEMORY) * speed
            if new != old:
                self._speeds[site] = new
                self._steps = balanced_steps(self._speeds, self._h, self._least)

    def steps(self) -> dict[str, int]:
        """By site; empty where the pace is the same for all, or not known yet."""
        return self._steps if self._least else {}
