"""Synchronous data parallel: gradients are averaged every step, as all-reduce does.

θ ← InnerOpt(θ, mean_i g_i) at every site (Li et al. 2020, 2006.15704, for DDP). All sites start
from the same weights and take the same steps, so their inner optimisers stay identical; the
coordinator mirrors them, and so knows the global weights without being sent them.
"""

from __future__ import annotations

from functools import partial

from fedwan.config import Config
from fedwan.outer.step import MirrorInner
from fedwan.recipes import MERGES, barrier_policy, gradients
from fedwan.strategy import Strategy

USES = ("codec.*", "site.partition*", *MERGES)
DEFAULTS = {"h": 1, "checkpoint.every": 50}


def build(config: Config) -> Strategy:
    """The recipe."""
    step = partial(MirrorInner, inner=config.inner, num_steps=config.steps)
    return gradients(config, step, barrier_policy(config, has_deadline=False))
