"""Ranges of the settings, and those that would have no effect. Recipes check what is theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedwan.errors import ConfigError
from fedwan.names import nearest, why_unsafe

if TYPE_CHECKING:
    from fedwan.config import Config, LinkConfig, StreamConfig

__all__ = ["check", "check_address"]

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_MANY = 1 << 62


def check(config: Config) -> None:
    """Refuse values that no run could use.

    Raises:
        ConfigError: the key, its value, and what it may be.
    """
    for key in ("workload", "strategy", "out"):
        _text(key, getattr(config, key))
    _whole("sites", config.sites, 1)
    _whole("steps", config.steps, 0)
    _whole("h", config.h, 0)
    _whole("seed", config.seed, 0)
    _choice("device", config.device, ("auto", "cpu", "cuda"))
    _check_site_names(config)
    _text("data.name", config.data.name)
    _text("data.split", config.data.split)
    _whole("data.batch", config.data.batch, 0)
    if config.data.size:
        _whole("data.size", config.data.size, 8, 1024, "0, or 8 to 1024")
    if config.data.direction:
        _choice("data.direction", config.data.direction, ("a_to_b", "b_to_a"))
    _whole("data.workers", config.data.workers, 0, 64)
    _check_optimizers(config)
    _choice(
        "site.precision", config.site.precision, ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
    )
    _whole("site.processes", config.site.processes, 1, 64)
    _check_partition(config)
    _whole("site.accumulate", config.site.accumulate, 1)
    _check_stream(config.stream)
    _check_link(config.link)
    _whole("round.quorum", config.round.quorum, 0, config.sites, f"0 to sites ({config.sites})")
    _positive("round.patience_s", config.round.patience_s)
    _number("round.grace", config.round.grace)
    _whole("round.max_staleness", config.round.max_staleness, 0)
    _whole("round.least_steps", config.round.least_steps, 0)
    _whole("round.warmup", config.round.warmup, 0)
    _number("round.max_norm", config.round.max_norm)
    _number("ema.half_life", config.ema.half_life)
    _whole("checkpoint.every", config.checkpoint.every, 0)
    _whole("eval.every", config.eval.every, 0)
    _whole("eval.samples", config.eval.samples, 1, 1024)
    _whole("eval.recalibrate", config.eval.recalibrate, 0)
    _check_log(config)


def check_address(key: str, value: str) -> None:
    """Refuse what is no `host:port`.

    Raises:
        ConfigError: it is not.
    """
    match = _ADDRESS.fullmatch(value)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise ConfigError(
            f"{key} = {value!r} is no host:port; write it like coordinator.example.com:7444"
        )


def _check_site_names(config: Config) -> None:
    names = config.site_names
    for name in names:
        if reason := why_unsafe(name):
            raise ConfigError(f"site_names holds {name!r}, which {reason}; choose another name")
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ConfigError(f"site_names holds {doubles[0]!r} twice; give each site its own name")
    if names and len(names) != config.sites:
        raise ConfigError(
            f"site_names holds {len(names)} names for sites = {config.sites}; "
            f"give {config.sites} names, or sites={len(names)}"
        )


def _check_optimizers(config: Config) -> None:
    for network, inner in config.inner.items():
        key = f"inner.{network}"
        _positive(f"{key}.lr", inner.lr)
        _number(f"{key}.warmup_steps", inner.warmup_steps)
        _share(f"{key}.beta1", inner.beta1)
        _share(f"{key}.beta2", inner.beta2)
        _number(f"{key}.weight_decay", inner.weight_decay)
        _number(f"{key}.clip_norm", inner.clip_norm)
    for network, special in config.network.items():
        _whole(f"network.{network}.h", special.h, 0)
        _number(f"network.{network}.ema_half_life", special.ema_half_life)
        for pattern in special.exclude:
            _text(f"network.{network}.exclude", pattern)
    for network, outer in config.outer.items():
        key = f"outer.{network}"
        _positive(f"{key}.lr", outer.lr)
        _share(f"{key}.momentum", outer.momentum)


def _check_partition(config: Config) -> None:
    partition = config.site.partition
    kinds = ("none", "optimizer", "gradients", "weights", "tensor_parallel")
    _choice("site.partition", partition, kinds)
    if partition != "none" and config.site.processes == 1:
        raise ConfigError(
            f"site.partition = {partition!r} has no effect with site.processes=1, which holds all "
            "there is; add site.processes=2, or leave it out"
        )


def _check_stream(stream: StreamConfig) -> None:
    _whole("stream.fragments", stream.fragments, 0)
    if stream.pattern:
        _choice("stream.pattern", stream.pattern, ("strided", "blocks"))
    if stream.tau is not None:
        _whole("stream.tau", stream.tau, 0)
    if stream.alpha is not None:
        _share("stream.alpha", stream.alpha)


def _check_link(link: LinkConfig) -> None:
    _text("link.host", link.host)
    _whole("link.port", link.port, 0, 65535)
    _whole("link.door_port", link.door_port, 0, 65535)
    if link.port and link.port == link.door_port:
        raise ConfigError(
            f"link.door_port = {link.door_port} is link.port as well; give the front door another"
        )
    if link.address:
        check_address("link.address", link.address)
    _number("link.rate_mbit", link.rate_mbit)
    _number("link.rtt_ms", link.rtt_ms)
    _share("link.loss", link.loss)
    if link.loss and not link.rtt_ms:
        raise ConfigError(
            f"link.loss = {link.loss!r} has no effect without a round trip; add link.rtt_ms=100"
        )
    _whole("link.channels", link.channels, 0, 64)
    _choice("link.congestion", link.congestion, ("auto", "bbr", "cubic", "system"))
    _choice("link.compression", link.compression, ("auto", "zstd", "none"))
    if link.pace_mbit and not 0.1 <= link.pace_mbit <= 1e6:
        raise _out_of_range("link.pace_mbit", link.pace_mbit, "0, or 0.1 to 1e6")
    _whole("link.chunk_bytes", link.chunk_bytes, 1 << 10, 1 << 24)
    _positive("link.heartbeat_s", link.heartbeat_s)
    _positive("link.patience_s", link.patience_s)


def _check_log(config: Config) -> None:
    _choice("log.wandb", config.log.wandb, ("disabled", "offline", "online"))
    _text("log.project", config.log.project)
    if config.log.wandb == "disabled" and config.log.project != type(config.log)().project:
        raise ConfigError(
            f"log.project = {config.log.project!r} has no effect while log.wandb is 'disabled'; "
            "add log.wandb=offline or log.wandb=online"
        )


def _text(key: str, value: str) -> None:
    if not value.strip() or not value.isprintable():
        raise ConfigError(f"{key} = {value!r} says nothing; give a name")


def _choice(key: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        near = nearest(value, valid)
        raise ConfigError(f"{key} = {value!r} is none of {', '.join(valid)}{near}")


def _whole(key: str, value: int, least: int, most: int = _MANY, range_text: str = "") -> None:
    if not least <= value <= most:
        text = range_text or (f"{least} or more" if most == _MANY else f"{least} to {most}")
        raise _out_of_range(key, value, text)


def _number(key: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise _out_of_range(key, value, "0 or more")


def _positive(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise _out_of_range(key, value, "more than 0")


def _share(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise _out_of_range(key, value, "0 or more and less than 1")


def _out_of_range(key: str, value: Any, text: str) -> ConfigError:
    return ConfigError(f"{key} = {value!r} is out of range; choose {text}")
