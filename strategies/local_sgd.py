"""Local SGD: local steps, then plain averaging of the weights.

Stich 2018 (1805.09767), algorithm 1; across sites known as federated averaging (McMahan et al.
2016, 1602.05629), and with a GAN's two networks as FedGAN (Rasouli et al. 2020, 2006.07228). The
mean of the weights is the global weights minus the mean delta: outer SGD with lr 1.
"""

from __future__ import annotations

from fedwan.config import Config
from fedwan.recipes import AVERAGING, IN_ROUNDS, MERGES, deltas_in_rounds
from fedwan.strategy import Strategy

USES = (*IN_ROUNDS, *MERGES, "round.least_steps", "privacy.*")
DEFAULTS = {"h": 20}


def build(config: Config) -> Strategy:
    """The recipe."""
    return deltas_in_rounds(config, AVERAGING, owes="weights")
