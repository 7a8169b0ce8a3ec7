"""Asynchronous DiLoCo: every site's delta moves the weights when it comes.

Liu et al. 2024 (2401.09135): deltas on arrival with delayed Nesterov (algorithm 3: momentum once
per N arrivals), dynamic local updates (section 5: a slow site takes fewer steps, so that its delta
is not staler than others'), after a synchronous warm-up. No site waits for another's steps. Stale
deltas bear less momentum than fresh ones: 0.7, where `diloco` has 0.9 (docs/log.md).
"""

from __future__ import annotations

from fedwan import outer
from fedwan.config import Config
from fedwan.recipes import ARRIVAL, LOCAL_STEPS, NO_EMA, deltas_in_rounds, nesterov, on_arrival
from fedwan.strategy import Strategy

USES = (*LOCAL_STEPS, NO_EMA, "outer.*", "round.max_staleness", "round.least_steps")
DEFAULTS = {"h": 20, "outer.*": nesterov(0.7), **ARRIVAL, "round.least_steps": 1}
WARMUP = 5
"""Rounds that wait for every site before updates are made on arrival."""


def build(config: Config) -> Strategy:
    """The recipe."""
    steps = {
        network: outer.delayed_nesterov(o.lr, o.momentum, every=config.num_sites)
        for network, o in config.outer.items()
    }
    return deltas_in_rounds(
        config, steps, owes="weights", policy=on_arrival(config, WARMUP), clock="samples"
    )
