"""What workload recipes share when they resolve a configuration: fill in, or refuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.data import check_data, pair_names, source_of
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.workloads.moments import STATES, has_moments
from fedwan.workloads.schedule import SCHEDULES

__all__ = [
    "fill_inner",
    "fill_training",
    "refuse_labels",
    "refuse_shown_samples",
    "require_at_least",
    "require_one_of",
    "require_parts",
]

_OPTIMIZERS = ("adam", "adamw", "muon", "sgd")


def fill_training(config: Config, batch: int, steps: int, *, pairs: bool = False) -> None:
    """Fill in `data.batch` and `steps` where the user named none, and check the data settings.

    Args:
        config: changed in place.
        batch: samples per site and step.
        steps: per site.
        pairs: the workload learns from pairs of an input and its target.

    Raises:
        ConfigError: see `fedwan.data.check_data`; or the data are no pairs, or pairs unasked.
    """
    check_data(config.data, config.sites)
    _require_pairs(config, pairs)
    config.data.batch = config.data.batch or batch
    config.steps = config.steps or steps
    require_parts(config)


def require_parts(config: Config, turns: int = 1) -> None:
    """Refuse a batch that cannot be computed in as many parts as asked.

    Args:
        config: with `data.batch` filled in.
        turns: that share the batch out before.

    Raises:
        ConfigError: parts would differ in size.
    """
    site, batch = config.site, config.data.batch // turns
    num_shares = 1 if site.partition == "tensor_parallel" else site.processes
    parts = num_shares * site.accumulate
    if batch % parts:
        above = turns * (batch + -batch % parts)
        shared = f"site.processes={site.processes} with " if num_shares > 1 else ""
        raise ConfigError(
            f"{shared}site.accumulate={site.accumulate} does not divide the {batch} samples of a "
            f"step; set data.batch={above}"
        )


def _require_pairs(config: Config, pairs: bool) -> None:
    workload, name = config.workload, config.data.name
    is_pairs = source_of(config.data).inputs > 0
    if pairs and not is_pairs:
        raise ConfigError(
            f"data.name = {name!r} holds no pairs of input and target, which workload "
            f"{workload!r} learns from; set data.name={pair_names()[0]}"
        )
    if is_pairs and not pairs:
        raise ConfigError(
            f"data.name = {name!r} holds pairs of input and target, which workload {workload!r} "
            f"does not learn from; set data.name={DataConfig().name}"
        )


def fill_inner(config: Config, network: str, default: InnerConfig) -> None:
    """Fill in a network's inner optimiser where the user named none.

    Raises:
        ConfigError: an unknown optimiser, schedule or state, a setting that it does not use, or a
            warm-up that is longer than the run.
    """
    chosen = config.inner.setdefault(network, copy.copy(default))
    key = f"inner.{network}"
    require_one_of(f"{key}.name", chosen.name, _OPTIMIZERS)
    if chosen.name == "sgd" and chosen.beta2 != InnerConfig().beta2:
        raise ConfigError(
            f"{key}.beta2 = {chosen.beta2!r} has no effect on sgd; leave it out, or set "
            f"{key}.name=adam"
        )
    require_one_of(f"{key}.schedule", chosen.schedule, SCHEDULES)
    require_one_of(f"{key}.state", chosen.state, STATES)
    if chosen.state != "keep" and not has_moments(chosen):
        raise ConfigError(
            f"{key}.state = {chosen.state!r} has no effect on sgd without momentum; leave it out, "
            f"or set {key}.beta1=0.9"
        )
    if chosen.warmup_steps > config.steps:
        raise ConfigError(
            f"{key}.warmup_steps = {chosen.warmup_steps} is more than the run's steps; choose "
            f"{config.steps} or less"
        )


def refuse_labels(config: Config, why: str, mend: str) -> None:
    """Refuse `data.labels=site` of networks that are not told any label.

    Raises:
        ConfigError: it is asked for.
    """
    if config.data.labels == "site":
        raise ConfigError(f"data.labels=site has no effect {why}; leave it out, or set {mend}")


def refuse_shown_samples(config: Config, from_inputs: bool) -> None:
    """Refuse `data.show_samples` of a workload whose samples are shown anyway.

    Args:
        config: of the run.
        from_inputs: the workload's samples are made of inputs that a site holds.

    Raises:
        ConfigError: it is asked for, and they are not.
    """
    if config.data.show_samples and not from_inputs:
        raise ConfigError(
            f"data.show_samples = True has no effect on workload {config.workload!r}, whose "
            "pictures are made of no site's inputs and are shown anyway; leave it out"
        )


def require_at_least(key: str, value: float, least: float) -> None:
    """Refuse a model setting that is too small, or no number.

    Raises:
        ConfigError: `value` is below `least`, or not finite.
    """
    if not least <= value < math.inf:
        raise ConfigError(f"{key} = {value!r} is out of range; choose {least} or more")


def require_one_of(key: str, value: str, valid: Collection[str]) -> None:
    """Refuse a setting that is none of some words.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in valid:
        raise ConfigError(f"{key} = {value!r} is none of {', '.join(valid)}{nearest(value, valid)}")
