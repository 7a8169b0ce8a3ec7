"""How large a contribution may be: a bound that follows what the run has merged.

Of each network's part of a fragment five figures are bounded: the norm of its deltas, of those of
averages over every step, of its running means, of its running variances, and its largest counter.
With those that were merged last

    bound = median + k max(1.4826 MAD, median / 4)

Before there are `LEAST_ROUNDS` rounds of them, and 8, those of one round are compared when it
closes: none may be above k times their median. That takes three contributions. The median bears
sites that lie as long as they are fewer than half. What fits within the bound is not judged: a
contribution of the right size in the wrong direction is a robust merge's affair.

Where most sites are refused, and hardly any is accepted, as when a learning rate rises again from
near 0, it is not they that are odd: what was merged is forgotten, and they are compared as at
first, with who was accepted.

Whatever k is, no counter may be further above the global one than a round's steps can take it.
Not locked.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from fedwan.protocol.policy import MAD_TO_SIGMA

LEAST_ROUNDS = 2
"""Rounds of all sites that are merged before any is measured by those before."""
LARGEST_COUNTER = "{}'s largest counter"
"""The figure of a network's integer buffers."""
_LEAST_OF_ROUND = 3
"""Contributions of which most can be told."""
_LEAST_FIGURES = 8
_MENDS = (
    "lower that site's inner learning rate or clip its gradients, or raise round.gate if all "
    "sites' contributions grow"
)
_MEMORY = 8
"""Figures that are kept, in units of the fewest that bound anything."""
_LEAST_SPREAD = 0.25
"""Of the median: sites that agree are not to be held to it."""


class Gate:
    """Of all fragments; k = 0 refuses nothing."""

    def __init__(self, k: float, num_sites: int) -> None:
        self._k = k
        self._most = max(_LEAST_OF_ROUND, num_sites // 2 + 1)
        self._refused: dict[int, set[str]] = {}
        """By fragment, the sites that were refused since one was merged."""
        self._least = max(_LEAST_FIGURES, LEAST_ROUNDS * num_sites)
        self._merged: dict[str, deque[float]] = {}
        """By fragment and figure, in the order in which they were merged."""
        self._bounds: dict[str, float] = {}
        """Of those, where one was asked for since: medians of many sites' figures take long."""

    def objection(
        self, fragment: int, site: str, figures: Mapping[str, float], num_taken: int = 0
    ) -> str:
        """Why a site's contribution must not be merged; empty where it may.

        `num_taken` others were accepted since one was merged.
        """
        for what, value in figures.items():
            key = f"{fragment}:{what}"
            merged = self._merged.get(key, ())
            if not self._k or len(merged) < self._least:
                continue
            if key not in self._bounds:
                self._bounds[key] = bound_of(merged, self._k)
            bound = self._bounds[key]
            if value > bound:
                median = statistics.median(merged)
                self._note_refused(fragment, site, num_taken)
                return (
                    f"{what} {value:.3g} is above {bound:.3g}, the most after a median of "
                    f"{median:.3g}; {_MENDS}"
                )
        return ""

    def _note_refused(self, fragment: int, site: str, num_taken: int) -> None:
        refused = self._refused.setdefault(fragment, set())
        refused.add(site)
        if len(refused) >= self._most and len(refused) > 2 * num_taken:
            for key in [key for key in self._merged if key.startswith(f"{fragment}:")]:
                del self._merged[key]
                self._bounds.pop(key, None)

    def is_warming(self, fragment: int) -> bool:
        """Whether contributions are measured by one another, once a round has all of them."""
        merged = [v for key, v in self._merged.items() if key.startswith(f"{fragment}:")]
        return bool(self._k) and min(map(len, merged), default=0) < self._least

    def odd_ones(self, figures: Sequence[Mapping[str, float]]) -> dict[int, str]:
        """Of all that a warming round was given, by place, what must not be merged, and why.

        None where no more than half would be left.
        """
        odd: dict[int, str] = {}
        for what in dict.fromkeys(what for each in figures for what in each):
            values = [each[what] for each in figures if what in each]
            if len(values) < _LEAST_OF_ROUND or not (median := statistics.median(values)):
                continue
            bound = max(1.0, self._k) * median
            for place, each in enumerate(figures):
                if each.get(what, 0.0) > bound:
                    odd[place] = (
                        f"{what} {each[what]:.3g} is above {bound:.3g}, {self._k:g} times the "
                        f"median of its round, which closes without it; {_MENDS}"
                    )
        return odd if 2 * len(odd) < len(figures) else {}

    def note(self, fragment: int, figures: Mapping[str, float]) -> None:
        """A contribution was merged."""
        self._refused.pop(fragment, None)
        for what, value in figures.items():
            new = deque[float](maxlen=_MEMORY * self._least)
            self._merged.setdefault(key := f"{fragment}:{what}", new).append(value)
            self._bounds.pop(key, None)

    def state(self) -> dict[str, list[float]]:
        """For checkpoints; JSON-ready."""
        return {name: list(values) for name, values in self._merged.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        for name, values in state.items():
            kept = deque(map(float, values), maxlen=_MEMORY * self._least)
            self._merged[name] = kept


def overcounted(figures: Mapping[str, float], present: Mapping[str, float], most: float) -> str:
    """Why counters cannot be true: they are more than `most` above the present ones; or nothing."""
    for what, value in present.items():
        if figures.get(what, 0.0) > value + most:
            return (
                f"{what} {figures[what]:.3g} is more than {most:.3g} above the run's {value:.3g}, "
                "which its steps cannot have counted; register an integer buffer that is no "
                "counter with persistent=False, or keep it at home with network.NETWORK.exclude"
            )
    return ""


def bound_of(figures: Sequence[float], k: float) -> float:
    """The largest that is still accepted; anything where most were 0.

    >>> bound_of([1.0, 1.0, 1.0, 1.0], k=20)
    6.0
    """
    median = statistics.median(figures)
    if not median:
        return math.inf
    spread = MAD_TO_SIGMA * statistics.median(abs(value - median) for value in figures)
    return median + k * max(spread, _LEAST_SPREAD * median)
