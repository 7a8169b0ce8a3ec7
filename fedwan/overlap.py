"""Overlap: how a site goes on stepping while a fragment's bytes travel.

A contribution leaves after step t, its update lands after step t + τ, when it has usually been
there for a while. With l the site's weights, g the global ones and g' the new ones:

    blend   at landing, l ← α l + (1 - α) g'. Streaming DiLoCo (2501.18512), algorithm 2.
    eager   the site does not wait to be told what it knows: its own part of the outer step, and the
            others' part c as it was in the round before (2502.12996, algorithm 2).
                at departure, l ← e + c with e = g + share (l - g)
                at landing,   l ← l + c' - c with c' = g' - e, now the others' latest part

Updates land at a fixed step, not when they happen to arrive, so that a run's bits depend on its
seed and not on the weather of the link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Overlap"]


@dataclass(frozen=True)
class Overlap:
    """τ and how updates land; the default waits for every update."""

    tau: int = 0
    """Steps between a contribution's departure and its update's landing, below H."""
    alpha: float = 0.0
    """Share of its own weights that a site keeps when an update lands; not used when eager."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """By network, how much of a site's own delta an outer step takes over: eager if not empty."""
