"""Learning rates over a run: warm-up, then constant, linear or cosine, by network.

A rate is a function of the run's step alone, not of how many steps an optimiser has taken: a site
that was away goes on with the rate that the others have, and a coordinator that steps gradients
itself has the sites' rates to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedwan.config import InnerConfig

__all__ = ["SCHEDULES", "rate_at", "set_rates"]

SCHEDULES = ("constant", "linear", "cosine")


def rate_at(config: InnerConfig, step: int, num_steps: int) -> float:
    """The learning rate of one step.

    Args:
        config: `lr`, `warmup_steps` and `schedule` are looked at.
        step: of the run, counted from 0; beyond the end, the last step's rate.
        num_steps: of the run.

    >>> warm = InnerConfig(lr=1.0, warmup_steps=4, schedule="linear")
    >>> [rate_at(warm, step, 8) for step in (0, 1, 3, 4, 6, 7, 9)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.25, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    rest = max(1, num_steps - config.warmup_steps)
    share = min(step - config.warmup_steps, rest - 1) / rest
    if config.schedule == "linear":
        return config.lr * (1.0 - share)
    assert config.schedule == "cosine"
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * share))


def set_rates(
    optimizers: Mapping[str, torch.optim.Optimizer],
    inner: Mapping[str, InnerConfig],
    step: int,
    num_steps: int,
) -> None:
    """Set the rates of one step."""
    for network, config in inner.items():
        if config.warmup_steps or config.schedule != "constant":
            for group in optimizers[network].param_groups:
                group["lr"] = rate_at(config, step, num_steps)
