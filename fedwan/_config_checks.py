"""What a setting may be: declared beside each field of `fedwan.config`, and checked here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

from fedwan._config_tree import leaves_of, value_at
from fedwan.errors import ConfigError
from fedwan.names import nearest, why_unsafe
from fedwan.uses import Faults, Needs, unmet

if TYPE_CHECKING:
    from fedwan.config import Config

__all__ = [
    "LISTENS",
    "NAMED",
    "POSITIVE",
    "SHARE",
    "check",
    "check_address",
    "one_of",
    "setting",
    "span",
]

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


class Valid(NamedTuple):
    """What values are valid, and how the message about another one ends."""

    holds: Callable[[Any], bool]
    says: Callable[[Any], str]


def _in_range(holds: Callable[[Any], bool], text: str) -> Valid:
    return Valid(holds, lambda _: f"is out of range; choose {text}")


def _is_named(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(name.strip() and name.isprintable() for name in names)


def _is_address(value: str, least_port: int = 1) -> bool:
    match = _ADDRESS.fullmatch(value)
    return match is not None and least_port <= int(match[1]) <= 65535


_NOT_NEGATIVE = _in_range(lambda value: 0 <= value < math.inf, "0 or more")
POSITIVE = _in_range(lambda value: 0 < value < math.inf, "more than 0")
SHARE = _in_range(lambda value: 0 <= value < 1, "0 or more and less than 1")
NAMED = Valid(_is_named, lambda _: "says nothing; give a name")
LISTENS = Valid(
    lambda value: _is_address(value, 0), lambda _: "is no host:port; write it like 0.0.0.0:7444"
)


def span(least: float, most: float = math.inf, *, or_zero: bool = False) -> Valid:
    """From one number to another, both included."""
    text = f"{least} or more" if most == math.inf else f"{least} to {most}"
    return _in_range(
        lambda value: least <= value <= most or (or_zero and value == 0),
        f"0, or {text}" if or_zero else text,
    )


def one_of(*choices: str) -> Any:
    """A field that takes one of these words, the first unless somebody sets it."""

    def says(value: Any) -> str:
        return f"is none of {', '.join(choices)}{nearest(value, choices)}"

    valid = Valid(lambda value: value in choices, says)
    return field(default=choices[0], metadata={"valid": valid, "choices": choices})


def setting(default: Any, valid: Valid) -> Any:
    """A field of a section with values of its own; other numbers are 0 or more."""
    return field(default=default, metadata={"valid": valid})


def check_address(key: str, value: str) -> None:
    """Refuse what is no `host:port`.

    Raises:
        ConfigError: it is not.
    """
    if not _is_address(value):
        raise ConfigError(
            f"{key} = {value!r} is no host:port; write it like coordinator.example.com:7444"
        )


_NEEDS = (
    Needs("link.loss", lambda c, _: c.link.rtt_ms > 0, "link.rtt_ms=100"),
    Needs("site.partition", lambda c, _: c.site.processes > 1, "site.processes=2"),
    Needs("inner.*.beta2", lambda c, n: c.inner[n].name != "sgd", "another optimiser than sgd"),
    Needs(
        "inner.*.state",
        lambda c, n: c.inner[n].name != "sgd" or c.inner[n].beta1 > 0,
        "an optimiser with moments, such as sgd with beta1=0.9",
    ),
    Needs(
        "inner.*.name=muon",
        lambda c, _: not c.site.cuts_weights,
        "whole matrices, as with site.partition=gradients",
    ),
)


def check(config: Config) -> None:
    """Refuse values that no run could use.

    Raises:
        ConfigError: a line for each: the key, its value, and what it may be.
    """
    faults = Faults()
    for key, value in leaves_of(config):
        valid = _valid_at(config, key, value)
        if valid is not None and not valid.holds(value):
            faults.add([f"{key} = {value!r} {valid.says(value)}"])
    faults.add(_together(config))
    faults.add(unmet(config, _NEEDS))
    faults.tell()


def _valid_at(config: Config, key: str, value: Any) -> Valid | None:
    head, _, leaf = key.rpartition(".")
    section = value_at(config, head)
    if isinstance(section, dict):
        return None  # its recipe's to check
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    default = _NOT_NEGATIVE if is_number else None
    valid: Valid | None = section.__dataclass_fields__[leaf].metadata.get("valid", default)
    return valid


def _together(config: Config) -> Iterator[str]:
    """Lines on settings that contradict each other."""
    names, sites, link = config.site_names, config.sites, config.link
    for name in names:
        if reason := why_unsafe(name):
            yield f"site_names holds {name!r}, which {reason}; choose another name"
    for double in sorted({name for name in names if names.count(name) > 1}):
        yield f"site_names holds {double!r} twice; give each site its own name"
    if names and len(names) != sites:
        yield (
            f"site_names holds {len(names)} names for sites = {sites}; "
            f"give {sites} names, or sites={len(names)}"
        )
    if config.round.quorum > sites:
        quorum = config.round.quorum
        yield f"round.quorum = {quorum} is out of range; choose 0 to sites ({sites})"
    if link.listen == link.door and not link.listen.endswith(":0"):
        yield f"link.door = {link.door!r} is link.listen as well; give the front door another port"
