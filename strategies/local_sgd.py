"""Local SGD: local steps, then plain averaging of the weights.

Stich 2018 (1805.09767), algorithm 1; across sites known as federated averaging (McMahan et al.
2016, 1602.05629), and with a GAN's two networks as FedGAN (Rasouli et al. 2020, 2006.07228). The
mean of the weights is the global weights minus the mean delta: outer SGD with lr 1.
"""

from __future__ import annotations

from fedwan import outer
from fedwan.config import Config
from fedwan.coordinator.server_step import step_outer
from fedwan.recipes import APART, GATE, LOCAL_STEPS, MERGES, WAITS, barrier_policy, codec, cut
from fedwan.strategy import Strategy

USES = (*LOCAL_STEPS, APART, GATE, *WAITS, *MERGES, "round.least_steps")
DEFAULTS = {"h": 20}


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="delta",
        h=config.h,
        fragments=cut(config),
        server_step=step_outer({network: outer.sgd(lr=1.0) for network in config.inner}),
        up=codec(config, "up"),
        down=codec(config, "down"),
        owes="weights",
        policy=barrier_policy(config),
        clock="samples" if config.round.least_steps else "versions",
        least_steps=config.round.least_steps,
    )
