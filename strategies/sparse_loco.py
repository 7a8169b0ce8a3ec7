"""SparseLoCo: deltas of 1.6 % of the values at 2 bits, with error feedback, averaged.

Sarfi et al. 2025 (2508.15706), algorithm 1: a_i = β e_i + Δ_i; what travels is Q(TopK(a_i)), the
rest is owed, e_i = a_i - Q(TopK(a_i)); the coordinator steps plain SGD on the mean, θ ← θ - lr Δ̄.
Error feedback takes the place of outer momentum. `topk2` has the paper's numbers; the way back is
coded once for all sites.

It is here for comparison with the publication: `local_sgd codec.up=topk2 codec.down=int4` sends the
same bytes and ends nearer to the data (docs/strategies.md). At H = 5 it did better than at 20
(docs/log.md, 2026-11-21).
"""

from __future__ import annotations

from fedwan.config import Config
from fedwan.recipes import AVERAGING, IN_ROUNDS, MERGES, deltas_in_rounds
from fedwan.strategy import Strategy

USES = (*IN_ROUNDS, *MERGES)
DEFAULTS = {"h": 5, "codec.up": "topk2", "codec.down": "int4"}


def build(config: Config) -> Strategy:
    """The recipe."""
    return deltas_in_rounds(config, AVERAGING)
