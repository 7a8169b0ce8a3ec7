"""Settings of a configuration by their dotted keys, as in `inner.generator.lr`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["default_at", "leaves_of", "put_at", "value_at"]


def leaves_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a configuration, with its key: `inner.generator.lr`."""
    items = config.items() if isinstance(config, Mapping) else vars(config).items()
    for key, value in items:
        if dataclasses.is_dataclass(value) or (isinstance(value, Mapping) and not prefix):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config


def put_at(config: Any, key: str, value: Any) -> None:
    """Set the value at a dotted key, in place."""
    head, _, leaf = key.rpartition(".")
    section = value_at(config, head) if head else config
    if isinstance(section, dict):
        section[leaf] = value
    else:
        setattr(section, leaf, value)


def default_at(config: Any, key: str) -> Any:
    """What the setting at a dotted key is unless somebody sets it; None of an open dict's."""
    head, _, leaf = key.rpartition(".")
    section = value_at(config, head) if head else config
    return None if isinstance(section, dict) else getattr(type(section)(), leaf)
