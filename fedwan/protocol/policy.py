"""When contributions become an update.

Two kinds of rounds. A barrier waits for every site; a round that a quorum has reached waits no
longer for sites that have gone, and for late ones until median + 3 MAD of past rounds (fixed
deadlines are wrong both ways: too short for a slow link, too long for a fast one). What comes later
is merged into a later version or dropped. On arrival, every contribution makes a version of its
own, and nobody waits for anybody.

Fewer sites than the quorum never go on by themselves: the round pauses, and after `patience_s` in
which no site has taken a step the run stops.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

Verdict = Literal["wait", "close", "stop"]

GRACE = 3.0
"""Deviations above the usual time of a round until its deadline."""
LEAST_ROUNDS = 5
"""Past rounds that a deviation is told from; from fewer it is taken for the median itself."""
LEAST_S = 0.5
"""That a round stays open after the usual time for its contributions."""
LEAST_SPREAD = 0.05
"""Of the median: a deviation below it is taken for this much, lest a hiccup miss the deadline."""
MAD_TO_SIGMA = 1.4826
"""What makes a median absolute deviation comparable with a standard deviation."""


class RoundPolicy(NamedTuple):
    """When a round closes, and what becomes of contributions that come too late for theirs."""

    num_sites: int
    quorum: int
    """Fewest sites that a round may close with; on arrival, fewest that must be live."""
    patience_s: float = 600.0
    """How long a round waits before it closes with a quorum, or for a step before the run stops."""
    has_deadline: bool = False
    """Whether a round with its quorum closes soon after the usual time, not after `patience_s`."""
    max_staleness: int = 0
    """Versions by which a contribution may be late and still be merged; those later are dropped."""
    discount: float = 0.0
    """p in (1 + staleness)^-p, by which a late contribution's parameters are scaled."""
    arrivals_from: int | None = None
    """Version from which every contribution makes a version of its own; None for never."""

    @property
    def leaves_behind(self) -> bool:
        """Whether versions follow each other without a site that is late, which has to catch up."""
        has_deadline = self.has_deadline and self.quorum < self.num_sites
        return has_deadline or self.arrivals_from is not None

    def is_on_arrival(self, version: int) -> bool:
        """Whether the update after `version` is made of one contribution."""
        return self.arrivals_from is not None and version >= self.arrivals_from

    def decide(
        self,
        num_arrived: int,
        elapsed_s: float,
        past_s: Sequence[float] = (),
        version: int = 0,
        num_live: int = 0,
        idle_s: float = math.inf,
    ) -> Verdict:
        """What to do `elapsed_s` seconds after the round's first contribution could have come.

        `idle_s`: since a site was last heard to have taken a step.

        >>> RoundPolicy(4, quorum=3, patience_s=60).decide(3, 59.0)
        'wait'
        >>> RoundPolicy(4, quorum=3, patience_s=60).decide(3, 60.0)
        'close'
        >>> RoundPolicy(4, quorum=3, patience_s=60).decide(2, 60.0)
        'stop'
        >>> RoundPolicy(4, quorum=3, patience_s=60).decide(2, 90.0, idle_s=59.0)
        'wait'
        >>> RoundPolicy(4, quorum=3, has_deadline=True).decide(3, 11.4, [9, 10, 10, 10, 11])
        'wait'
        >>> RoundPolicy(4, quorum=3, has_deadline=True).decide(3, 11.5, [9, 10, 10, 10, 11])
        'close'
        >>> RoundPolicy(4, quorum=2, arrivals_from=0).decide(1, 0.0, num_live=1)
        'wait'
        """
        if self.is_on_arrival(version):
            closes = num_arrived and num_live >= self.quorum
        else:
            is_late = num_arrived >= self.quorum and elapsed_s >= self.deadline_s(past_s)
            closes = num_arrived >= self.num_sites or is_late
        if closes:
            return "close"
        return "wait" if min(elapsed_s, idle_s) < self.patience_s else "stop"

    def deadline_s(self, past_s: Sequence[float]) -> float:
        """Seconds after which a round closes with a quorum.

        >>> policy = RoundPolicy(4, quorum=3, has_deadline=True)
        >>> [round(policy.deadline_s(past), 1) for past in ([], [9], [9, 10, 10, 10, 11])]
        [600.0, 36.0, 11.5]
        """
        if not self.has_deadline or not past_s:
            return self.patience_s
        median = statistics.median(past_s)
        spread = MAD_TO_SIGMA * statistics.median(abs(s - median) for s in past_s)
        least = LEAST_SPREAD if len(past_s) >= LEAST_ROUNDS else 1.0
        return min(self.patience_s, median + max(GRACE * max(spread, least * median), LEAST_S))

    def scale(self, staleness: int) -> float:
        """What a contribution's parameters are multiplied by that is so many versions late.

        >>> RoundPolicy(4, quorum=2, discount=0.5).scale(3)
        0.5
        """
        return float((1.0 + staleness) ** -self.discount) if staleness else 1.0
