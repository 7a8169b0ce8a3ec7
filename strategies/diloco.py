"""DiLoCo: local steps, and outer SGD with Nesterov momentum on the merged deltas.

Douillard et al. 2023 (2311.08105), algorithm 1: every site takes H inner steps from the global
weights θ; with Δ_i = θ - θ_i the coordinator steps θ ← OuterOpt(θ, mean_i Δ_i). Inner optimiser
state stays at its site.
"""

from __future__ import annotations

from fedwan.config import Config
from fedwan.recipes import IN_ROUNDS, MERGES, deltas_in_rounds, nesterov, with_momentum
from fedwan.strategy import Strategy

USES = (*IN_ROUNDS, "outer.*", *MERGES, "round.least_steps", "privacy.*")
DEFAULTS = {"h": 20, "outer.*": nesterov()}


def build(config: Config) -> Strategy:
    """The recipe."""
    return deltas_in_rounds(config, with_momentum(config), owes="weights")
