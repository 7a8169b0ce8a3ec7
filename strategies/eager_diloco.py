"""Eager DiLoCo: a site takes its own outer step at once, and hears of the others' later.

Kale et al. 2025 (2502.12996), algorithm 2: with Δ_i its own delta, a site goes on from where the
outer step would lead had the others not moved, OuterOpt(θ, Δ_i / M), and is put right by what they
did when the update lands τ steps later. Without outer momentum by default: a push that is felt
before it is corrected swings (docs/log.md), so that long overlaps diverge with 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fedwan import outer
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
from fedwan.overlap import Eager
from fedwan.recipes import (
    barrier_policy,
    codec,
    fill_barrier,
    fill_codec,
    fill_outer,
    fill_schedule,
    fill_stream,
    fragmentation,
    overlap,
    refuse_alpha,
    refuse_round,
    require_overlap,
)
from fedwan.site.eager import LookAhead
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind


def resolve(config: Config, networks: Mapping[str, NetworkKind]) -> None:
    """Fill in H = 20, 4 strided fragments, τ = 5, and outer lr 1 without momentum."""
    fill_schedule(config, h=20, checkpoint_every=1)
    fill_codec(config)
    fill_barrier(config)
    refuse_round(config, "least_steps", "has all sites follow one schedule", "diloco")
    refuse_alpha(config, "keeps all of a site's progress")
    require_overlap(config, "looks ahead of updates that are on their way")
    fill_stream(config, fragments=4, tau=5)
    for network in networks:
        fill_outer(config, network, lr=1.0, momentum=0.0)


def build(config: Config) -> Strategy:
    """The recipe."""
    known = {
        network: Eager(o.lr * (1 + o.momentum) / config.sites, o.momentum)
        for network, o in config.outer.items()
    }
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
        hook=partial(LookAhead, known),
    )
