"""How a run in virtual time went."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Course", "RoundNote"]


class RoundNote(NamedTuple):
    """How one round of one fragment went."""

    fragment: int
    version: int
    """That it led to."""
    began_s: float
    """When the coordinator turned to it."""
    closed_s: float
    contributions: int


@dataclass
class Course:
    """How a run went."""

    wall_s: float = 0.0
    """Until the last site had its last update."""
    rounds: list[RoundNote] = field(default_factory=list)
    contributions: int = 0
    """That were merged."""
    late: int = 0
    """Of these, into a later version than the one they were made for."""
    dropped: int = 0
    """That came too late to be merged."""
    rejoins: int = 0
    compute_s: list[float] = field(default_factory=list)
    """By site; steps that were lost count too."""
    num_steps: int = 0
    """Of all sites; those that were lost count too."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Without the final weights of sites at a pace of their own."""
    marks: list[list[float]] = field(default_factory=list)
    """By site, when the step after so many times H began; NaN where it never came by."""
    busy_s: float = 0.0
    """That the coordinator merged and committed."""
    stopped: str = ""
    """Why it ended early, if it did."""

    def utilisation(self, step_s: Sequence[float], h: int, first: int, last: int) -> float:
        """Share of the time in which sites compute, between the starts of two rounds.

        A site at its own pace may not come as far, since others took more of the run's steps: up to
        the last round that it began.

        Args:
            step_s: of each site.
            h: steps of a round.
            first: the round whose start is the beginning.
            last: the round whose start is the end.
        """
        return statistics.mean(
            _share(marks, h * seconds, first, last)
            for seconds, marks in zip(step_s, self.marks, strict=True)
        )


def _share(marks: Sequence[float], steps_s: float, first: int, last: int) -> float:
    """Of a site's time, in which it computes; its steps of a round take so many seconds."""
    begun = [index for index in range(first + 1, last + 1) if not math.isnan(marks[index])]
    if not begun:
        return math.nan
    return (begun[-1] - first) * steps_s / (marks[begun[-1]] - marks[first])
