"""SparseLoCo: deltas of 1.6 % of the values at 2 bits, with error feedback, averaged.

Sarfi et al. 2025 (2508.15706), algorithm 1: a_i = β e_i + Δ_i; what travels is Q(TopK(a_i)), the
rest is owed, e_i = a_i - Q(TopK(a_i)); the coordinator steps plain SGD on the mean, θ ← θ - lr Δ̄.
Error feedback takes the place of outer momentum. `topk2` has the paper's numbers; the way back is
coded once for all sites.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedwan import outer
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
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
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind


def resolve(config: Config, networks: Mapping[str, NetworkKind]) -> None:
    """Fill in H = 20, `topk2` up and `int4` down; outer SGD has lr 1."""
    fill_schedule(config, h=20, checkpoint_every=1)
    fill_codec(config, up="topk2", down="int4")
    refuse_outer(config, networks, "takes plain outer steps with lr 1")
    refuse_stream(config)
    fill_barrier(config)
    refuse_round(config, "least_steps", "owes what it did not send to equal steps", "diloco")


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="delta",
        h=config.h,
        fragments=cut(config),
        server_step=step_outer({network: outer.sgd(lr=1.0) for network in config.inner}),
        up=codec(config, "up"),
        down=codec(config, "down"),
        policy=barrier_policy(config),
    )
