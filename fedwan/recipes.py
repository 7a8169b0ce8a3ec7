"""What strategy recipes share when they resolve a configuration: fill in, or refuse."""

from __future__ import annotations

from collections.abc import Mapping

from fedwan.config import Config, OuterConfig
from fedwan.errors import ConfigError
from fedwan.workloads.base import NetworkKind

__all__ = ["fill_outer", "fill_schedule", "refuse_h", "refuse_outer"]


def fill_schedule(config: Config, h: int, checkpoint_every: int) -> None:
    """Fill in H and the checkpoints' interval; see that the steps make whole rounds.

    Args:
        config: changed in place; `steps` is resolved.
        h: steps between uploads where the user named none.
        checkpoint_every: rounds between checkpoints where the user named none.

    Raises:
        ConfigError: `steps` is no multiple of `h`, so that the last steps would never be merged.
    """
    config.h = config.h or h
    config.checkpoint.every = config.checkpoint.every or checkpoint_every
    rest = config.steps % config.h
    if rest:
        below, above = config.steps - rest, config.steps - rest + config.h
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"steps={config.steps} is no multiple of h={config.h}, so the last {rest} steps would "
            f"never be merged; set steps={nearest}"
        )


def fill_outer(config: Config, network: str, lr: float, momentum: float) -> None:
    """Fill in a network's outer settings where the user named none.

    Raises:
        ConfigError: a value is out of range.
    """
    chosen = config.outer.setdefault(network, OuterConfig(lr, momentum))
    if not chosen.lr > 0:
        raise ConfigError(f"outer.{network}.lr={chosen.lr:g}; set it above 0")
    if not 0 <= chosen.momentum < 1:
        raise ConfigError(f"outer.{network}.momentum={chosen.momentum:g}; set it in [0, 1)")


def refuse_outer(config: Config, networks: Mapping[str, NetworkKind], why: str) -> None:
    """Refuse outer settings, which a strategy without outer optimiser would ignore.

    Raises:
        ConfigError: there are some.
    """
    for network in networks:
        if network in config.outer:
            raise ConfigError(
                f"outer.{network} has no effect: strategy {config.strategy!r} {why}; "
                "leave it out, or set strategy=diloco"
            )


def refuse_h(config: Config, why: str) -> None:
    """Refuse an H that a strategy without local steps would ignore.

    Raises:
        ConfigError: H is neither open nor 1.
    """
    if config.h not in (0, 1):
        raise ConfigError(
            f"h={config.h} has no effect: strategy {config.strategy!r} {why}; "
            "leave it out, or set strategy=local_sgd"
        )
