"""Synchronous data parallel: gradients are averaged every step, as all-reduce does.

θ ← InnerOpt(θ, mean_i g_i) at every site (Li et al. 2020, 2006.15704, for DDP). All sites start
from the same weights and take the same steps, so their inner optimisers stay identical; the
coordinator mirrors them, and so knows the global weights without being sent them.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedwan.config import Config
from fedwan.coordinator.server_step import mirror_inner
from fedwan.fragments import whole
from fedwan.recipes import (
    barrier_policy,
    codec,
    fill_barrier,
    fill_codec,
    fill_schedule,
    refuse_h,
    refuse_outer,
    refuse_own_inner,
    refuse_round,
    refuse_state,
    refuse_stream,
)
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind


def resolve(config: Config, networks: Mapping[str, NetworkKind]) -> None:
    """One step a round, and rarer looks: a round is as short as a step."""
    refuse_h(config, "exchanges gradients in every step")
    refuse_own_inner(config, "steps the inner optimisers at the coordinator")
    fill_schedule(config, h=1, checkpoint_every=50)
    fill_codec(config)
    refuse_outer(config, networks, "steps the inner optimisers on the mean gradient")
    refuse_state(config, "has the same moments at every site already")
    refuse_stream(config)
    fill_barrier(config)
    refuse_round(config, "grace", "goes nowhere without all gradients", "parameter_server")
    refuse_round(config, "max_staleness", "cannot use gradients of past steps", "parameter_server")
    refuse_round(config, "least_steps", "exchanges gradients in every step", "diloco")


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="gradient",
        h=1,
        fragments=whole,
        server_step=mirror_inner(config.inner, config.steps),
        up=codec(config, "up"),
        down=codec(config, "down"),
        policy=barrier_policy(config),
    )
