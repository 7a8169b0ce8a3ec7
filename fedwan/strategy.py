"""What a strategy is: the vocabulary in which `strategies/NAME.py` is written.

A strategy is a recipe: what sites contribute and how often, what the coordinator does with the
merged contribution, how both directions are coded, and when a round closes. The engine knows it
through these fields and never by its name. A recipe module provides

    def build(config) -> Strategy
    USES, DEFAULTS, check(config)            optional: its settings, see `fedwan.uses`
    EXPERTS                                  optional: True where each site trains networks of its
                                             own, see `fedwan.models.experts`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.fragments import Fragment, Fragmentation
from fedwan.outer.step import ServerStep
from fedwan.protocol.policy import RoundPolicy
from fedwan.state import Layout, State

if TYPE_CHECKING:
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


class Landing(NamedTuple):
    """An update that is about to land: the global weights have moved, the local ones have not."""

    steps: int
    """Between two landings of the fragment."""
    taken: int
    """Of these in this site's latest contribution: fewer if it went on where the others stood."""
    is_merged: bool
    """Whether this site's latest contribution is in the update."""
    is_replaced: bool
    """Whether the local weights will simply become the global ones."""
    residual: State
    """What error feedback added to that contribution: whole tensors, at rank 0 alone."""
    owed: State
    """What it owed afterwards: as above."""


class SiteHook:
    """What a strategy keeps and does at a site: nothing, but for what a subclass overrides.

    So `strategies/scaffnew.py` corrects steps. All methods run in the step loop's thread. Where a
    network lies in pieces, a hook works on this process's own, and writes to local weights within
    `Replica.following`. Tensors of `state` go into the site's checkpoints, and are put back by
    writing into them.
    """

    state: State

    def __init__(self) -> None:
        self.state = {}

    def after_step(self) -> None:
        """A step is complete, and no contribution has left yet."""

    def before_send(self, fragment: Fragment) -> None:
        """With overlap: a fragment's Δ was taken and is about to leave.

        Local weights may be changed, which steps go on from meanwhile.
        """

    def on_update(self, fragment: Fragment, payload: Source, codec: Codec) -> None:
        """The global weights were moved by this update; may be called in another thread."""

    def on_land(self, fragment: Fragment, landing: Landing) -> bool:
        """An update lands; True if the hook has written the local weights itself."""
        return False

    def on_adopt(self) -> None:
        """The global weights were taken over whole, at whatever versions they are."""

    def forget(self, fragment: Fragment) -> None:
        """Begin anew: another site has lost its state."""


class Strategy(NamedTuple):
    """One way of training together."""

    contributes: Literal["delta", "gradient"]
    """`delta`: sites step on their own and send what changed. `gradient`: sites send gradients
    within every step, and their inner optimisers take the same step everywhere."""
    h: int
    """Steps between two uploads of the same fragment; 1 for gradients."""
    fragments: Fragmentation
    server_step: Callable[[State, Layout], ServerStep]
    """Makes what turns merged contributions into new global weights, from the initial ones."""
    up: Codec
    """Of contributions."""
    down: Codec
    """Of updates."""
    policy: RoundPolicy
    """When a round closes."""
    overlap: Overlap = Overlap()
    clock: Literal["versions", "samples"] = "versions"
    """What ends a run: `versions`, as many rounds as the steps of a site make; `samples`, as many
    samples as the steps of all sites make, whoever took them. Sites then keep their own pace."""
    least_steps: int = 0
    """Where the clock is `samples`: fewest steps of a site between two uploads, others take more by
    their speed and the fastest takes H; 0 leaves H to all of them."""
    hook: Callable[[Replica], SiteHook] | None = None
    """What it keeps and does at a site; for deltas, not at a pace of the sites' own."""
    share: Callable[[Layout, int], Layout] | None = None
    """Which tensors a site contributes, by its number, where sites move different ones; each is
    merged from those that have it."""
    owes: Literal["residual", "weights"] = "residual"
    """Where a site keeps what error feedback owes. `residual`: beside its weights, added to the
    next delta, as in most papers. `weights`: in its weights, which then do not quite become the
    global ones (Xie et al. 2020, 2007.13221, CSER), so that the next delta holds it by itself and
    the site's steps go on from what it has learned, sent or not. Not with an overlap."""

    def part(self, fragment: Fragment, site: int) -> Fragment:
        """What a site, by its number, contributes of a fragment."""
        if self.share is None:
            return fragment
        return replace(fragment, layout=self.share(fragment.layout, site))

    @property
    def is_mirrored(self) -> bool:
        """Whether every site's optimisers take the same steps, on the sites' mean gradient."""
        return self.contributes == "gradient" and self.clock == "versions"

    def is_exact(self, num_fragments: int) -> bool:
        """Whether another process of a site can make its contribution again, bit for bit."""
        is_alone = num_fragments == 1 and not self.overlap.tau
        return is_alone and self.contributes == "delta" and self.clock == "versions"

    def repeats(self, num_fragments: int) -> bool:
        """Whether a site that lost what it had at a version takes the steps to it again.

        Not where others go on without it: by then its steps would be too late.
        """
        return self.is_exact(num_fragments) and self.policy.quorum >= self.policy.num_sites
