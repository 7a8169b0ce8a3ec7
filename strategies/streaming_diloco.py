"""Streaming DiLoCo: the model travels in fragments while the sites go on stepping.

Douillard et al. 2025 (2501.18512), algorithm 2: fragment p leaves at its own step of the round;
its merged update is stepped as DiLoCo's; after τ more steps a site mixes it in,
l ← α l + (1 - α) θ_p. Peak bandwidth falls by the number of fragments, and no site waits as long as
a fragment's way there and back takes less than τ steps; with τ = 0 it waits for each.
Δ suits 4 bits (`codec.up=float4`, `int4`).
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
    STREAM,
    WAITS,
    barrier_policy,
    codec,
    fragmentation,
    nesterov,
    overlap,
)
from fedwan.strategy import Strategy

USES = (*LOCAL_STEPS, APART, GATE, "outer.*", "stream.*", *WAITS, *MERGES)
DEFAULTS = {"h": 20, **STREAM, "outer.*": nesterov()}
ALPHA = 0.5


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="delta",
        h=config.h,
        fragments=fragmentation(config),
        server_step=step_outer(
            {network: outer.nesterov(o.lr, o.momentum) for network, o in config.outer.items()}
        ),
        up=codec(config, "up"),
        down=codec(config, "down"),
        policy=barrier_policy(config),
        overlap=overlap(config, ALPHA),
    )
