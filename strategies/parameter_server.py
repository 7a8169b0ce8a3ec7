"""A parameter server: asynchronous SGD across sites.

Dean et al. 2012 ("Large scale distributed deep networks", Downpour SGD): a site pushes the gradient
of the weights that it pulled last and pulls anew, without waiting for others; the coordinator steps
the inner optimisers on every gradient that comes, θ ← InnerOpt(θ, g_i / (1 + s)), with s the
staleness, the steps that others made meanwhile (Zhang et al. 2016, 1511.05950, eq. 6). Gradients
that are staler than `round.max_staleness` are dropped. As many bytes up as synchronous training,
and down the updates of all sites.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedwan.config import Config
from fedwan.coordinator.policy import on_arrival
from fedwan.coordinator.server_step import step_inner
from fedwan.fragments import whole
from fedwan.recipes import (
    codec,
    fill_arrival,
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
    """One step between two pushes; no outer settings, no warm-up."""
    refuse_h(config, "pushes gradients in every step")
    refuse_own_inner(config, "steps the inner optimisers at the coordinator")
    fill_schedule(config, h=1, checkpoint_every=50)
    fill_codec(config)
    refuse_outer(config, networks, "steps the inner optimisers on every gradient")
    refuse_state(config, "has its moments at the coordinator alone")
    refuse_stream(config)
    refuse_round(config, "warmup", "updates on arrival from the first step on", "async_diloco")
    refuse_round(config, "least_steps", "pushes gradients in every step", "async_diloco")
    fill_arrival(config, warmup=0, least_steps=0)


def build(config: Config) -> Strategy:
    """The recipe."""
    rounds = config.round
    return Strategy(
        contributes="gradient",
        h=1,
        fragments=whole,
        server_step=step_inner(config.inner, config.steps),
        up=codec(config, "up"),
        down=codec(config, "down"),
        policy=on_arrival(
            config.sites, rounds.quorum, rounds.patience_s, rounds.max_staleness, discount=1.0
        ),
        clock="samples",
    )
