"""Scaffnew: local steps under control variates, then plain averaging of the weights.

Mishchenko et al. 2022 (2202.09357), algorithm 1, there with gradient descent and a random H: a site
adds to each step what the sites' mean moved beyond its own steps in the round before. So it stays
with the others where its data pull it elsewhere, as a discriminator's do that sees two classes of
ten. Nothing more travels than under `local_sgd`. What it corrects lags by a round: the more the
shards differ, the smaller H times the learning rate has to be.

What coding loses would add up: a site cannot tell it from what the others have moved, and takes it
for its own to make up for. So a site compares with what it sent, not with where it stood, and both
ways have error feedback. Where a quorum goes on, who is not in an update does not learn from it.
"""

from __future__ import annotations

from fedwan import outer
from fedwan.codecs import with_feedback
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
from fedwan.recipes import APART, WAITS, barrier_policy, codec, cut
from fedwan.site.variates import ControlVariates
from fedwan.strategy import Strategy

USES = ("h", "inner.*", "network.*.exclude", APART, "site.partition", "site.precision*", WAITS[0])
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
