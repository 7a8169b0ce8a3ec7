"""Eager DiLoCo: a site takes its own outer step at once, and hears of the others' later.

Kale et al. 2025 (2502.12996), algorithm 2: with Δ_i its own delta, a site goes on from where the
outer step would lead had the others not moved, OuterOpt(θ, Δ_i / M), and is put right by what they
did when the update lands τ steps later. Without outer momentum by default: a push that is felt
before it is corrected swings (docs/log.md), so that long overlaps diverge with 0.9.
"""

from __future__ import annotations

from functools import partial

from fedwan import outer
from fedwan.config import Config, OuterConfig
from fedwan.coordinator.server_step import step_outer
from fedwan.overlap import Eager
from fedwan.recipes import (
    APART,
    LOCAL_STEPS,
    STREAM,
    WAITS,
    barrier_policy,
    codec,
    fragmentation,
    overlap,
)
from fedwan.site.eager import LookAhead
from fedwan.strategy import Strategy

USES = (*LOCAL_STEPS, APART, "outer.*", "stream.fragments", "stream.tau", *WAITS)
DEFAULTS = {"h": 20, **STREAM, "outer.*": OuterConfig(lr=1.0, momentum=0.0)}


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
