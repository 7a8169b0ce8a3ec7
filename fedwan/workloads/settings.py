"""What workload recipes share when they resolve a configuration: fill in, or refuse."""

from __future__ import annotations

import copy

from fedwan.config import Config, InnerConfig
from fedwan.data import check_data
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.workloads.schedule import SCHEDULES

__all__ = ["fill_inner", "fill_training", "require_at_least"]

_OPTIMIZERS = ("adam", "adamw", "sgd")


def fill_training(config: Config, batch: int, steps: int) -> None:
    """Fill in `data.batch` and `steps` where the user named none, and check the data settings.

    Raises:
        ConfigError: see `fedwan.data.check_data`.
    """
    check_data(config.data, config.sites)
    config.data.batch = config.data.batch or batch
    config.steps = config.steps or steps


def fill_inner(config: Config, network: str, default: InnerConfig) -> None:
    """Fill in a network's inner optimiser where the user named none.

    Raises:
        ConfigError: an unknown optimiser or schedule, a setting that it does not use, or a warm-up
            that is longer than the run.
    """
    chosen = config.inner.setdefault(network, copy.copy(default))
    key = f"inner.{network}"
    if chosen.name not in _OPTIMIZERS:
        near = nearest(chosen.name, _OPTIMIZERS)
        raise ConfigError(f"{key}.name = {chosen.name!r} is none of {', '.join(_OPTIMIZERS)}{near}")
    if chosen.name == "sgd" and chosen.beta2 != InnerConfig().beta2:
        raise ConfigError(
            f"{key}.beta2 = {chosen.beta2!r} has no effect on sgd; leave it out, or set "
            f"{key}.name=adam"
        )
    if chosen.schedule not in SCHEDULES:
        near = nearest(chosen.schedule, SCHEDULES)
        raise ConfigError(
            f"{key}.schedule = {chosen.schedule!r} is none of {', '.join(SCHEDULES)}{near}"
        )
    if chosen.warmup_steps > config.steps:
        raise ConfigError(
            f"{key}.warmup_steps = {chosen.warmup_steps} is more than the run's steps; choose "
            f"{config.steps} or less"
        )


def require_at_least(key: str, value: float, least: float) -> None:
    """Refuse a model setting that is too small.

    Raises:
        ConfigError: `value` is below `least`.
    """
    if not value >= least:
        raise ConfigError(f"{key} = {value!r} is out of range; choose {least} or more")
