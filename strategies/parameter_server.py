"""A parameter server: asynchronous SGD across sites.

Dean et al. 2012 ("Large scale distributed deep networks", Downpour SGD): a site pushes the gradient
of the weights that it pulled last and pulls anew, without waiting for others; the coordinator steps
the inner optimisers on every gradient that comes, θ ← InnerOpt(θ, g_i / (1 + s)), with s the
staleness, the steps that others made meanwhile (Zhang et al. 2016, 1511.05950, eq. 6). Gradients
that are staler than `round.max_staleness` are dropped. As many bytes up as synchronous training,
and down the updates of all sites.
"""

from __future__ import annotations

from functools import partial

from fedwan.config import Config
from fedwan.outer.step import StepInner
from fedwan.recipes import ARRIVAL, gradients, on_arrival
from fedwan.strategy import Strategy

USES = ("codec.*", "round.max_staleness")
DEFAULTS = {"h": 1, "checkpoint.every": 50, **ARRIVAL}


def build(config: Config) -> Strategy:
    """The recipe."""
    step = partial(StepInner, inner=config.inner, num_steps=config.steps)
    return gradients(config, step, on_arrival(config, 0, discount=1.0), clock="samples")
