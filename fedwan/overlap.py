"""Overlap: how a site goes on stepping while a fragment's bytes travel.

A contribution leaves after step t, its update lands after step t + τ, when it has usually been
there for a while. With l the site's weights, g the global ones and g' the new ones:

    blend   at landing, l ← α l + (1 - α) g'. Streaming DiLoCo (2501.18512), algorithm 2.
    eager   the site takes at once the part of the outer step that it knows, its own delta and the
            momentum's push c, and the others' part when the update lands (2502.12996, algorithm 2):
                at departure, l ← e with e = g - share (g - l) + c
                at landing,   l ← l + (g' - e)

For outer SGD with learning rate η and Nesterov momentum μ over M sites, share = η (1 + μ) / M, and
c = -η μ² b with b the momentum buffer, which a site follows from the updates alone:
c' = (μ c + μ² (g' - g)) / (1 + μ).

Updates land at a fixed step, not when they happen to arrive, so that a run's bits depend on its
seed and not on the weather of the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Eager", "Overlap"]


class Eager(NamedTuple):
    """What a site knows of the next outer step of a network."""

    share: float
    """Of its own delta that the step will take over."""
    momentum: float
    """The outer optimiser's."""


@dataclass(frozen=True)
class Overlap:
    """τ and how updates land; the default waits for every update."""

    tau: int = 0
    """Steps between a contribution's departure and its update's landing, below H."""
    alpha: float = 0.0
    """Share of its own weights that a site keeps when an update lands."""
