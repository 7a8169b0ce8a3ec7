"""Streaming DiLoCo: the model travels in fragments while the sites go on stepping.

Douillard et al. 2025 (2501.18512), algorithm 2: fragment p leaves at its own step of the round;
its merged update is stepped as DiLoCo's; after τ more steps a site mixes it in,
l ← α l + (1 - α) θ_p. Peak bandwidth falls by the number of fragments, and no site waits as long as
a fragment's way there and back takes less than τ steps; with τ = 0 it waits for each.
Δ suits 4 bits (`codec.up=float4`, `int4`).
"""

from __future__ import annotations

from collections.abc import Mapping

from fedwan import outer
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
from fedwan.recipes import (
    barrier_policy,
    codec,
    fill_barrier,
    fill_codec,
    fill_nesterov,
    fill_schedule,
    fill_stream,
    fragmentation,
    overlap,
    refuse_round,
)
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind


def resolve(config: Config, networks: Mapping[str, NetworkKind]) -> None:
    """Fill in H = 20, 4 strided fragments, τ = 5, α = 0.5, and each network's outer settings."""
    fill_schedule(config, h=20, checkpoint_every=1)
    fill_codec(config)
    fill_barrier(config)
    refuse_round(config, "least_steps", "has all sites follow one schedule", "diloco")
    fill_stream(config, fragments=4, tau=5, alpha=0.5)
    fill_nesterov(config, networks)


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
        overlap=overlap(config),
    )
