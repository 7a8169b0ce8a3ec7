"""DiLoCo: local steps, and outer SGD with Nesterov momentum on the merged deltas.

Douillard et al. 2023 (2311.08105), algorithm 1: every site takes H inner steps from the global
weights θ; with Δ_i = θ - θ_i the coordinator steps θ ← OuterOpt(θ, mean_i Δ_i). Inner optimiser
state stays at its site.

Outer settings are per network. Adversarial networks bear little momentum: with 0.9, which suits
language models and flows, a GAN's two networks overshoot each other and diverge.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedwan import outer
from fedwan.codecs import codec_by_name
from fedwan.config import Config
from fedwan.coordinator.policy import barrier
from fedwan.coordinator.server_step import step_outer
from fedwan.fragments import whole
from fedwan.recipes import fill_outer, fill_schedule
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind

ADVERSARIAL = (0.5, 0.5)
"""(lr, momentum) of a GAN's networks."""

REGRESSION_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
"""Outer lr by number of sites, Charles et al. 2025 (2503.09799); momentum 0.9."""


def resolve(config: Config, networks: Mapping[str, NetworkKind]) -> None:
    """Fill in H = 20 and each network's outer settings."""
    fill_schedule(config, h=20, checkpoint_every=1)
    nearest = max(n for n in REGRESSION_LR if n <= max(1, config.sites))
    defaults = {"adversarial": ADVERSARIAL, "regression": (REGRESSION_LR[nearest], 0.9)}
    for network, kind in networks.items():
        lr, momentum = defaults[kind]
        fill_outer(config, network, lr=lr, momentum=momentum)


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="delta",
        h=config.h,
        fragments=whole,
        server_step=step_outer(
            {network: outer.nesterov(o.lr, o.momentum) for network, o in config.outer.items()}
        ),
        up=codec_by_name(config.codec.up),
        down=codec_by_name(config.codec.down),
        policy=barrier(config.sites, config.round.quorum, config.round.patience_s),
    )
