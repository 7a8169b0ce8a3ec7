"""What a setting may be, declared beside its field in `fedwan.config`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from fedwan._config_tree import leaves_of, value_at
from fedwan.errors import ConfigError
from fedwan.names import nearest

Valid = Callable[[Any], str]
"""Of a value: nothing, or what is wrong with it, as in `is out of range; choose 1 to 64`."""

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


def _in_range(holds: Callable[[Any], bool], text: str) -> Valid:
    return lambda value: "" if holds(value) else f"is out of range; choose {text}"


def _port_of(value: str) -> int:
    match = _ADDRESS.fullmatch(value)
    return int(match[1]) if match and int(match[1]) <= 65535 else -1


NOT_NEGATIVE = _in_range(lambda value: 0 <= value < math.inf, "0 or more")
POSITIVE = _in_range(lambda value: 0 < value < math.inf, "more than 0")
SHARE = _in_range(lambda value: 0 <= value < 1, "0 or more and less than 1")


def NAMED(value: str | list[str]) -> str:
    """Text, or a list of it, that says something."""
    names = value if isinstance(value, list) else [value]
    is_named = all(name.strip() and name.isprintable() for name in names)
    return "" if is_named else "says nothing; give a name"


def LISTENS(value: str) -> str:
    """An address to listen on, where port 0 means any."""
    return "" if _port_of(value) >= 0 else "is no host:port; write it like 0.0.0.0:7444"


def span(least: float, most: float = math.inf, *, or_zero: bool = False) -> Valid:
    """From one number to another, both included."""
    text = f"{least} or more" if most == math.inf else f"{least} to {most}"
    return _in_range(
        lambda value: least <= value <= most or (or_zero and value == 0),
        f"0, or {text}" if or_zero else text,
    )


def one_of(*choices: str) -> Any:
    """A field that takes one of these words, the first unless somebody sets it."""

    def valid(value: Any) -> str:
        says = f"is none of {', '.join(filter(None, choices))}{nearest(value, choices)}"
        return "" if value in choices else says

    return field(default=choices[0], metadata={"valid": valid, "choices": choices})


def setting(default: Any, valid: Valid) -> Any:
    """A field of a section with values of its own; other numbers are 0 or more."""
    return field(default=default, metadata={"valid": valid})


def check_address(key: str, value: str) -> None:
    """Refuse what is no `host:port`."""
    if _port_of(value) < 1:
        raise ConfigError(
            f"{key} = {value!r} is no host:port; write it like coordinator.example.com:7444"
        )


def invalid(config: Any) -> Iterator[str]:
    """A line for each value that its field does not take: the key, the value, what it may be."""
    for key, value in leaves_of(config):
        head, _, leaf = key.rpartition(".")
        section = value_at(config, head)
        if isinstance(section, dict):
            continue  # its recipe's to check
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        default = NOT_NEGATIVE if is_number else None
        valid = section.__dataclass_fields__[leaf].metadata.get("valid", default)
        if valid is not None and (fault := valid(value)):
            yield f"{key} = {value!r} {fault}"
