"""What `fedwan plan` is told: a run's settings and its own, and which of them are settled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedwan._config_tree import overlay, parse_words, read_yaml
from fedwan.config import Config, merge
from fedwan.errors import ConfigError

__all__ = ["COMPARED", "PlanConfig", "leaves", "read_settings", "run_config"]

COMPARED = ("strategy", "h", "codec", "stream", "outer")
"""Open unless a word settles them, whatever the file has."""
WITHOUT_WORKLOAD = frozenset(
    "params step_s loss usd_per_gb strategy sites steps h codec.up codec.down stream.fragments "
    "stream.tau round.quorum round.patience_s link.rate_mbit "
    "link.rtt_ms link.loss link.congestion link.pace_mbit".split()
)
"""Keys that mean something where no workload is given."""


@dataclass
class PlanConfig(Config):
    """A run's settings, and those that only a plan has."""

    strategy: str = "all"
    """A recipe in `strategies/`, or `all` of them."""
    params: float = 0.0
    """Values of the model, where no workload tells."""
    step_s: float = 0.0
    """Seconds of a step; 0 measures it, where there is a workload."""
    loss: float = 0.0
    """Short for `link.loss`: share of packets lost, 0 to 1."""
    usd_per_gb: float = 0.0
    """Price of what is sent, either way, for the column of costs; 0 leaves it out."""


def read_settings(
    path: Path | None, words: list[str], link: str
) -> tuple[PlanConfig, frozenset[str]]:
    """The settings, checked, and the keys that words settle.

    Args:
        path: of CONFIG.yaml, or None.
        words: `key=value` words.
        link: where the link was or will be measured; empty if the settings describe it.

    Raises:
        ConfigError: a key that is unknown or has no effect, a value out of range or missing.
    """
    file_tree = {} if path is None else read_yaml(path)
    tree = parse_words(words, PlanConfig)
    # A file's own strategy is one of those that are compared, not the only one.
    compared = {key: value for key, value in file_tree.items() if key not in COMPARED}
    config = overlay(PlanConfig(), file_tree)  # all of it is checked
    config = overlay(PlanConfig(), compared, tree)
    # 0 leaves these to the strategy, as if they had not been named.
    is_open = {"h": not config.h, "stream.fragments": not config.stream.fragments}
    named = frozenset(key for key in leaves(tree) if not is_open.get(key))
    if config.loss:
        if "link.loss" in named:
            raise ConfigError("loss and link.loss say the same; leave one of them out")
        config.link.loss = config.loss
    run_config(config)  # ranges
    for network, special in config.network.items():
        if special.h:
            raise ConfigError(
                f"network.{network}.h={special.h} cannot be planned for: a plan takes all networks "
                "to travel together; leave it out"
            )
    for key, least in (("params", 1.0), ("step_s", 1e-6), ("usd_per_gb", 0.0)):
        value = getattr(config, key)
        if key in named and not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{key} = {value!r} is out of range; choose {least:g} or more")
    _check_sources(path, config, named, link)
    return config, named


def _check_sources(path: Path | None, config: PlanConfig, named: frozenset[str], link: str) -> None:
    """See that model and link come from one place each."""
    if path is not None and "params" in named:
        raise ConfigError(
            f"params = {config.params:g} has no effect: {str(path)!r} names the workload, which "
            "tells; leave one of them out"
        )
    if path is None:
        for key, example in (("params", "params=57.2e6"), ("step_s", "step_s=0.1")):
            if not getattr(config, key):
                raise ConfigError(
                    f"{key} has no value; give {example}, or a CONFIG.yaml whose workload tells"
                )
        for key in sorted(named - WITHOUT_WORKLOAD):
            raise ConfigError(f"{key} has no effect on a plan without a CONFIG.yaml; leave it out")
    if link:
        for key in ("link.rate_mbit", "link.rtt_ms", "link.loss", "loss"):
            if key in named:
                raise ConfigError(f"{key} has no effect: --link tells; leave one of them out")
    elif not config.link.rate_mbit:
        raise ConfigError(
            "link.rate_mbit has no value; give link.rate_mbit=100 link.rtt_ms=100, or --link with "
            "what `fedwan doctor link --json` wrote"
        )


def run_config(config: PlanConfig) -> Config:
    """Without a plan's own keys, checked."""
    return merge(Config(**{field.name: getattr(config, field.name) for field in fields(Config)}))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of nested values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
