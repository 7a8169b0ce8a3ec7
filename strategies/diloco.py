"""DiLoCo: local steps, and outer SGD with Nesterov momentum on the merged deltas.

Douillard et al. 2023 (2311.08105), algorithm 1: every site takes H inner steps from the global
weights θ; with Δ_i = θ - θ_i the coordinator steps θ ← OuterOpt(θ, mean_i Δ_i). Inner optimiser
state stays at its site.
"""

from __future__ import annotations

from fedwan import outer
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
from fedwan.recipes import (
    APART,
    GATE,
    LOCAL_STEPS,
    MERGES,
    WAITS,
    barrier_policy,
    codec,
    cut,
    nesterov,
)
from fedwan.strategy import Strategy

USES = (*LOCAL_STEPS, APART, GATE, "outer.*", *WAITS, *MERGES, "round.least_steps")
DEFAULTS = {"h": 20, "outer.*": nesterov()}


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="delta",
        h=config.h,
        fragments=cut(config),
        server_step=step_outer(
            {network: outer.nesterov(o.lr, o.momentum) for network, o in config.outer.items()}
        ),
        up=codec(config, "up"),
        down=codec(config, "down"),
        owes="weights",
        policy=barrier_policy(config),
        clock="samples" if config.round.least_steps else "versions",
        least_steps=config.round.least_steps,
    )
