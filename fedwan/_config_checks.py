"""What the settings may be, whatever the recipes: ranges, choices, and what goes with what."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fedwan._config_keys import leaves_of
from fedwan.errors import ConfigError
from fedwan.names import nearest, why_unsafe
from fedwan.uses import Faults, Needs, unmet

if TYPE_CHECKING:
    from fedwan.config import Config

__all__ = ["check", "check_address"]

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")

_LEAST = {"sites": 1, "site.accumulate": 1, "site.processes": 1}
"""Least value of whole numbers, where it is not 0."""
_MOST = {
    "data.workers": 64,
    "site.processes": 64,
    "link.port": 65535,
    "link.door_port": 65535,
    "link.channels": 64,
}
_POSITIVE = ("inner.*.lr", "outer.*.lr", "round.patience_s")
_SHARES = ("inner.*.beta1", "inner.*.beta2", "outer.*.momentum", "link.loss")
"""0 or more and less than 1."""
_NAMES = ("workload", "strategy", "out", "data.name", "data.split", "link.host")
_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "data.direction": ("", "a_to_b", "b_to_a"),
    "inner.*.name": ("adam", "adamw", "muon", "sgd", "own"),
    "inner.*.schedule": ("constant", "linear", "cosine"),
    "inner.*.state": ("keep", "reset", "average"),
    "site.precision": ("32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    "site.partition": ("none", "gradients", "weights", "tensor_parallel"),
    "link.congestion": ("auto", "bbr", "cubic", "system"),
    "log.wandb": ("disabled", "offline", "online"),
}


def _is_whole(config: Config, _: str) -> bool:
    return not config.site.cuts_weights


_NEEDS = (
    Needs("link.loss", lambda c, _: c.link.rtt_ms > 0, "link.rtt_ms=100"),
    Needs("site.partition", lambda c, _: c.site.processes > 1, "site.processes=2"),
    Needs("inner.*.beta2", lambda c, n: c.inner[n].name != "sgd", "another optimiser than sgd"),
    Needs(
        "inner.*.state",
        lambda c, n: c.inner[n].name != "sgd" or c.inner[n].beta1 > 0,
        "an optimiser with moments, such as sgd with beta1=0.9",
    ),
    Needs("inner.*.name=muon", _is_whole, "whole matrices, as with site.partition=gradients"),
)


def check(config: Config) -> None:
    """Refuse values that no run could use.

    Raises:
        ConfigError: a line for each: the key, its value, and what it may be.
    """
    faults = Faults()
    for key, value in leaves_of(config):
        with faults.caught():
            _check_leaf(key, value)
    faults.add(_together(config))
    faults.add(unmet(config, _NEEDS))
    faults.tell()


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


def _check_leaf(key: str, value: Any) -> None:
    if key.startswith("model."):
        return  # its recipe's to check
    choices = next((valid for k, valid in _CHOICES.items() if fnmatchcase(key, k)), None)
    if choices is not None and value not in choices:
        near = nearest(value, choices)
        raise ConfigError(f"{key} = {value!r} is none of {', '.join(filter(None, choices))}{near}")
    if key in _NAMES:
        _check_text(key, value)
    elif key.endswith(".exclude"):
        for pattern in value:
            _check_text(key, pattern)
    elif key == "link.address" and value:
        check_address(key, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        _check_whole(key, value)
    elif isinstance(value, float):
        _check_number(key, value)


def _check_text(key: str, value: str) -> None:
    if not value.strip() or not value.isprintable():
        raise ConfigError(f"{key} = {value!r} says nothing; give a name")


def _check_whole(key: str, value: int) -> None:
    least, most = _LEAST.get(key, 0), _MOST.get(key, 1 << 62)
    if key == "data.size" and value and not 8 <= value <= 1024:
        raise _out_of_range(key, value, "0, or 8 to 1024")
    if not least <= value <= most:
        text = f"{least} to {most}" if key in _MOST else f"{least} or more"
        raise _out_of_range(key, value, text)


def _check_number(key: str, value: float) -> None:
    if any(fnmatchcase(key, pattern) for pattern in _SHARES):
        is_fine, text = 0 <= value < 1, "0 or more and less than 1"
    elif any(fnmatchcase(key, pattern) for pattern in _POSITIVE):
        is_fine, text = 0 < value < math.inf, "more than 0"
    elif key == "link.pace_mbit":
        is_fine, text = value == 0 or 0.1 <= value <= 1e6, "0, or 0.1 to 1e6"
    else:
        is_fine, text = 0 <= value < math.inf, "0 or more"
    if not is_fine:
        raise _out_of_range(key, value, text)


def _out_of_range(key: str, value: Any, text: str) -> ConfigError:
    return ConfigError(f"{key} = {value!r} is out of range; choose {text}")


def _together(config: Config) -> Iterator[str]:
    """Lines on settings that contradict each other."""
    names, link = config.site_names, config.link
    for name in names:
        if reason := why_unsafe(name):
            yield f"site_names holds {name!r}, which {reason}; choose another name"
    for double in sorted({name for name in names if names.count(name) > 1}):
        yield f"site_names holds {double!r} twice; give each site its own name"
    if names and len(names) != config.sites:
        yield (
            f"site_names holds {len(names)} names for sites = {config.sites}; "
            f"give {config.sites} names, or sites={len(names)}"
        )
    if config.round.quorum > config.sites:
        yield (
            f"round.quorum = {config.round.quorum} is out of range; choose 0 to sites "
            f"({config.sites})"
        )
    if link.port and link.port == link.door_port:
        yield f"link.door_port = {link.door_port} is link.port as well; give the front door another"
