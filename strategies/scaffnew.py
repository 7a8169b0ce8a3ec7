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

from collections.abc import Mapping

from fedwan import outer
from fedwan.codecs import with_feedback
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
from fedwan.errors import ConfigError
from fedwan.recipes import (
    barrier_policy,
    codec,
    cut,
    fill_barrier,
    fill_codec,
    fill_schedule,
    refuse_outer,
    refuse_round,
    refuse_stream,
)
from fedwan.site.variates import ControlVariates
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind


def resolve(config: Config, networks: Mapping[str, NetworkKind]) -> None:
    """Fill in H = 20; averaging has no outer settings."""
    fill_schedule(config, h=20, checkpoint_every=1)
    fill_codec(config)
    own = {f"network.{name}.codec_up": n.codec_up for name, n in config.network.items()}
    for key, name in {"codec.up": config.codec.up, **own}.items():
        if name == "topk2":
            raise ConfigError(
                f"{key}=topk2 leaves most of a site's steps owed, so that it cannot tell how they "
                f"differ from the others'; set {key}=int4, or strategy=local_sgd"
            )
    if config.site.cuts_weights:
        raise ConfigError(
            f"site.partition={config.site.partition} keeps weights in pieces, which would have to "
            "be put together after every step to be corrected; set site.partition=gradients"
        )
    refuse_outer(config, networks, "averages the weights")
    refuse_stream(config)
    fill_barrier(config)
    refuse_round(config, "least_steps", "compares equal numbers of steps", "local_sgd")
    refuse_round(config, "max_staleness", "compares steps from the same weights", "local_sgd")


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
