"""Streaming DiLoCo: the model travels in fragments while the sites go on stepping.

Douillard et al. 2025 (2501.18512), algorithm 2: fragment p leaves at its own step of the round;
its merged update is stepped as DiLoCo's; after τ more steps a site mixes it in,
l ← α l + (1 - α) θ_p. Peak bandwidth falls by the number of fragments, and no site waits as long as
a fragment's way there and back takes less than τ steps; with τ = 0 it waits for each.
Δ suits 4 bits (`codec.up=int4`).
"""

from __future__ import annotations

from fedwan.config import Config
from fedwan.recipes import (
    IN_ROUNDS,
    MERGES,
    PRIVATE_SITES,
    STREAM,
    deltas_in_rounds,
    nesterov,
    streamed,
    with_momentum,
)
from fedwan.strategy import Strategy

USES = (*IN_ROUNDS, "outer.*", "stream.*", *MERGES, PRIVATE_SITES)
DEFAULTS = {"h": 20, **STREAM, "outer.*": nesterov()}
ALPHA = 0.5


def build(config: Config) -> Strategy:
    """The recipe."""
    return deltas_in_rounds(config, with_momentum(config), **streamed(config, ALPHA))
