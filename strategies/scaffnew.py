"""Scaffnew: local steps under control variates, then plain averaging of the weights.

Mishchenko et al. 2022 (2202.09357), algorithm 1, there with gradient descent and a random H: a site
adds to each step what the sites' mean moved beyond its own steps in the round before. So it stays
with the others where its data pull it elsewhere, as a discriminator's do that sees two classes of
ten. Nothing more travels than under `local_sgd`. What it corrects lags by a round: the more the
shards differ, the smaller H times the learning rate has to be.

What coding loses would add up: a site cannot tell it from what the others have moved, and takes it
for its own to make up for. So a site compares with what it sent, not with where it stood, and both
ways have error feedback. Where a quorum goes on, who is not in an update does not learn from it.

After H steps from the same weights a site stands at l and the merged weights at g. What its steps
had in common with the others' is in both; the rest, (g - l) / H a step, is owed to its shard:

    l <- step(l) + e        e <- e + (g - l) / H when g lands        sum of e over the sites = 0

The sum has to stay 0: what it lacks moves all sites the same way in every step to come. When a site
comes back without what it had learnt, all begin anew. Here e corrects the steps of any inner
optimiser: it is in units of weights, not of gradients. It costs no byte, as g lands anyway, where
SCAFFOLD (Karimireddy et al. 2019, 1910.06378) sends as much again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan import outer
from fedwan.codecs import with_feedback
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
from fedwan.fragments import Fragment
from fedwan.recipes import APART, GATE, WAITS, barrier_policy, codec, cut
from fedwan.site.group import local
from fedwan.site.replica import Replica
from fedwan.state import Role
from fedwan.strategy import Landing, SiteHook, Strategy

USES = (
    "h",
    "inner.*",
    "network.*.exclude",
    APART,
    GATE,
    "site.partition",
    "site.precision*",
    WAITS[0],
)
DEFAULTS = {"h": 20}


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="delta",
        h=config.h,
        fragments=cut(config),
        server_step=step_outer({network: outer.sgd(lr=1.0) for network in config.inner}),
        up=codec(config, "up", with_feedback),
        down=codec(config, "down", with_feedback),
        policy=barrier_policy(config),
        hook=ControlVariates,
    )


class ControlVariates(SiteHook):
    """Of one site's parameters.

    Memory: a copy of the parameters, on their device. Time: to add one to the other each step.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        names = [name for name, spec in replica.layout.items() if spec.role is Role.PARAMETER]
        self._replica = replica
        live = {name: local(replica.live[name]) for name in names}
        self.state = {name: torch.zeros_like(value) for name, value in live.items()}
        """By parameter, what each step is corrected by."""
        self._pairs: tuple[list[Tensor], list[Tensor]] = (
            list(live.values()),
            list(self.state.values()),
        )

    def forget(self, fragment: Fragment) -> None:
        """E ← 0, as at the beginning of the run."""
        for name in fragment.layout.keys() & self.state.keys():
            self.state[name].zero_()

    @torch.no_grad()
    def after_step(self) -> None:
        """L ← l + e, once after every step."""
        torch._foreach_add_(*self._pairs)

    @torch.no_grad()
    def on_land(self, fragment: Fragment, landing: Landing) -> bool:
        """E ← e + (g - l) / H, where this site's contribution is in what lands."""
        if not landing.is_merged:
            return False
        replica = self._replica
        owed = set(replica.group.lead(lambda: list(landing.owed)))
        added = set(replica.group.lead(lambda: list(landing.residual)))
        for name in fragment.layout:
            if name not in self.state:
                continue
            live = local(replica.live[name])
            moved = local(replica.base[name]).to(live.dtype) - live
            if name in owed:
                moved.sub_(replica.piece(name, landing.owed.get(name)).to(live))
            if name in added:
                moved.add_(replica.piece(name, landing.residual.get(name)).to(live))
            self.state[name].add_(moved, alpha=1 / landing.steps)
        return False
