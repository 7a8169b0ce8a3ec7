"""Scaffnew: local steps under control variates, then plain averaging of the weights.

Mishchenko et al. 2022 (2202.09357), algorithm 1, there with gradient descent and a random H: a site
adds to each step what the sites' mean moved beyond its own steps in the round before. So it stays
with the others where its data pull it elsewhere, as a discriminator's do that sees two classes of
ten. Nothing more travels than under `local_sgd`. What it corrects lags by a round: the more the
shards differ, the smaller H times the learning rate has to be.

What coding loses would add up: a site cannot tell it from what the others have moved, and takes it
for its own to make up for. So a site compares with what it sent, not with where it stood, and both
ways have error feedback. Where a quorum goes on, who is not in an update does not learn from it.

After H steps from the global weights g a site stands at l, and the merged weights at g'. What its
steps had in common with the others' is in both; the rest, (g' - l) / H, is owed to its shard:

    l <- step(l) + e + c        e <- e + (g' - l) / H when g' lands        sum of e over sites = 0
                                c <- mu (g' - g) / H

c is the same at every site, and none unless `outer.NETWORK.momentum`, mu, is set: Polyak's momentum
of the global weights, taken in H parts along the way and not in one leap, so that a site's
gradients are of where the weights are going. Rates that are small enough for H are too small to
train fast; what all sites agree on may move faster than where they differ.

The sum has to stay 0: what it lacks moves all sites the same way in every step to come. g' is a
mean by steps, so a site that took n of H learns (n / H) (g' - l) / H. When a site comes back
without what it had learnt, all begin anew. Here e corrects the steps of any inner optimiser: it is
in units of weights, not of gradients. It costs no byte, as g lands anyway, where SCAFFOLD
(Karimireddy et al. 2019, 1910.06378) sends as much again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from fedwan.codecs import with_feedback
from fedwan.config import Config, OuterConfig
from fedwan.fragments import Fragment
from fedwan.pieces import local
from fedwan.recipes import APART, AVERAGING, GATE, codec, deltas_in_rounds
from fedwan.site.replica import Replica
from fedwan.state import Role, add_prefix, is_moment, network_of
from fedwan.strategy import Landing, SiteHook, Strategy

USES = (
    *("h", "inner.*", "outer.*.momentum", "network.*.exclude", APART, GATE),
    *("site.partition", "site.precision*"),
)
DEFAULTS = {"h": 20, "outer.*": OuterConfig(lr=1.0, momentum=0.0)}


def build(config: Config) -> Strategy:
    """The recipe."""
    return deltas_in_rounds(
        config,
        AVERAGING,
        up=with_feedback(codec(config, "up")),
        down=with_feedback(codec(config, "down")),
        hook=partial(ControlVariates, {name: o.momentum for name, o in config.outer.items()}),
    )


class ControlVariates(SiteHook):
    """Of one site's parameters.

    Memory: a copy of the parameters, on their device; two more of networks with momentum. Time: to
    add one to the other each step.
    """

    def __init__(self, momentum: Mapping[str, float], replica: Replica) -> None:
        super().__init__()
        self._replica, self._momentum = replica, momentum
        layout = replica.layout.items()
        names = [n for n, spec in layout if spec.role is Role.PARAMETER and not is_moment(n)]
        # The parameters themselves: what they hold may be replaced (`Replica.follow`).
        live = {name: local(replica.inner.params[name]) for name in names}
        pushed = [name for name in names if momentum[network_of(name)]]
        self.variates = {
            name: torch.zeros_like(
                value.detach(), dtype=torch.promote_types(value.dtype, torch.float32)
            )
            for name, value in live.items()
        }
        """By parameter, e: sums of what half precision would lose."""
        self.pushes = {name: torch.zeros_like(self.variates[name]) for name in pushed}
        """By parameter, c."""
        self._starts = {name: local(replica.base[name]).clone() for name in pushed}
        """By parameter, g: the global weights that this site's steps began at."""
        self.state = (
            self.variates | add_prefix("push", self.pushes) | add_prefix("start", self._starts)
        )
        self._pairs = [
            ([live[name] for name in added], list(added.values()))
            for added in (self.variates, self.pushes)
            if added
        ]

    def forget(self, fragment: Fragment) -> None:
        """E ← 0, as at the beginning of the run."""
        for name in fragment.layout.keys() & self.variates.keys():
            self.variates[name].zero_()

    @torch.no_grad()
    def after_step(self) -> None:
        """L ← l + e + c, once after every step."""
        with self._replica.following(self.variates):
            for weights, added in self._pairs:
                torch._foreach_add_(weights, added)

    @torch.no_grad()
    def on_land(self, fragment: Fragment, landing: Landing) -> bool:
        """C ← μ (g' - g) / H; e ← e + (g' - l) / H, if what lands has this site's contribution."""
        for name in fragment.layout.keys() & self._starts.keys():
            base, start = local(self._replica.base[name]), self._starts[name]
            pace = self._momentum[network_of(name)] / landing.steps
            self.pushes[name].copy_(base - start).mul_(pace)
            start.copy_(base)
        if landing.is_merged:
            self._learn(fragment, landing)
        return False

    def _learn(self, fragment: Fragment, landing: Landing) -> None:
        replica = self._replica
        owed = set(replica.group.lead(lambda: list(landing.owed)))
        added = set(replica.group.lead(lambda: list(landing.residual)))
        for name in fragment.layout:
            if name not in self.variates:
                continue
            live = local(replica.live[name])
            moved = local(replica.base[name]).to(live.dtype).to(self.variates[name].dtype) - live
            if name in owed:
                moved.sub_(replica.piece(name, landing.owed.get(name)).to(moved))
            if name in added:
                moved.add_(replica.piece(name, landing.residual.get(name)).to(moved))
            self.variates[name].add_(moved, alpha=landing.taken / landing.steps**2)

    @torch.no_grad()
    def on_adopt(self) -> None:
        """Where these are not the weights that landed last, c is 0 until the next ones land."""
        for name, start in self._starts.items():
            base = local(self._replica.base[name])
            if not torch.equal(start, base):
                start.copy_(base)
                self.pushes[name].zero_()
