"""What a strategy is: the vocabulary in which `strategies/NAME.py` is written.

A strategy is a recipe: what sites contribute and how often, what the coordinator does with the
merged contribution, how both directions are coded, and when a round closes. The engine knows it
through these fields and never by its name. A recipe module provides

    def build(config) -> Strategy
    USES, DEFAULTS, check(config)            optional: its settings, see `fedwan.uses`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from fedwan.codecs import Codec
from fedwan.coordinator.server_step import ServerStep
from fedwan.fragments import Fragmentation
from fedwan.protocol.policy import RoundPolicy
from fedwan.state import Layout, State

if TYPE_CHECKING:
    from fedwan.site.hook import SiteHook
    from fedwan.site.replica import Replica


@dataclass(frozen=True)
class Overlap:
    """How a site goes on stepping while a fragment's bytes travel; the default waits.

    A contribution leaves after step t, its update lands after step t + τ, when it has usually been
    there for a while: l ← α l + (1 - α) g' (Streaming DiLoCo, 2501.18512, algorithm 2). It lands at
    a fixed step, not when it happens to arrive, so that a run's bits depend on its seed alone.
    """

    tau: int = 0
    """Steps between a contribution's departure and its update's landing, below H."""
    alpha: float = 0.0
    """Share of its own weights that a site keeps when an update lands."""


class Strategy(NamedTuple):
    """One way of training together."""

    contributes: Literal["delta", "gradient"]
    """`delta`: sites step on their own and send what changed. `gradient`: sites send gradients
    within every step, and their inner optimisers take the same step everywhere."""
    h: int
    """Steps between two uploads of the same fragment; 1 for gradients."""
    fragments: Fragmentation
    """Which tensors travel together."""
    server_step: Callable[[State, Layout], ServerStep]
    """Makes what turns merged contributions into new global weights, from the initial ones."""
    up: Codec
    """Of contributions."""
    down: Codec
    """Of updates."""
    policy: RoundPolicy
    """When a round closes."""
    overlap: Overlap = Overlap()
    """How sites go on stepping while bytes travel."""
    clock: Literal["versions", "samples"] = "versions"
    """What ends a run: `versions`, as many rounds as the steps of a site make; `samples`, as many
    samples as the steps of all sites make, whoever took them. Sites then keep their own pace."""
    least_steps: int = 0
    """Where the clock is `samples`: fewest steps of a site between two uploads, others take more by
    their speed and the fastest takes H; 0 leaves H to all of them."""
    hook: Callable[[Replica], SiteHook] | None = None
    """Makes what the strategy keeps and does at a site (`fedwan.site.hook`); for deltas, not at a
    pace of the sites' own."""
    owes: Literal["residual", "weights"] = "residual"
    """Where a site keeps what error feedback owes. `residual`: beside its weights, added to the
    next delta, as in most papers. `weights`: in its weights, which then do not quite become the
    global ones (Xie et al. 2020, 2007.13221, CSER), so that the next delta holds it by itself and
    the site's steps go on from what it has learned, sent or not. Not with an overlap."""
