"""Which settings have an effect: what pages declare, and the one check that reads it.

A page, `strategies/NAME.py` or `sites/NAME.py`, says in `USES` which of the settings that not every
page follows it does follow, and in `DEFAULTS` what takes the place of those that were left open:

    USES = ("h", "outer.*", Needs("stream.tau", lambda config, _: …, "h=2 or more"))
    DEFAULTS = {"h": 20, "stream.tau": lambda config: min(5, config.h - 1)}

A setting is named by its key, `*` standing for any network: `inner.*.state`. `key=value` names one
value alone, such as `site.partition=weights`, which asks more of a page than the key itself;
what stands behind a colon in it is not looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fedwan.config_tree import leaves_of, put_at, value_at
from fedwan.errors import ConfigError


@dataclass(frozen=True)
class Needs:
    """A setting that has an effect under a condition alone."""

    key: str
    """Of the setting, or `key=value`."""
    holds: Callable[[Any, str], bool]
    """The condition, of the configuration and of the network that the key's `*` stands for."""
    mend: str | Callable[[Any], str]
    """What makes it hold, such as `link.rtt_ms=100`, or a function of the configuration."""


Uses = Sequence[str | Needs]


class Faults:
    """Collects what is wrong, to be told at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, lines: Iterable[str]) -> None:
        """Note what was not noted before."""
        self.lines += [line for line in dict.fromkeys(lines) if line not in self.lines]

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Note a `ConfigError`'s lines, and go on behind this block."""
        try:
            yield
        except ConfigError as error:
            self.add(str(error).splitlines())

    def tell(self) -> None:
        """Raise what was noted as one ConfigError, a line each; nothing if there is nothing."""
        if self.lines:
            raise ConfigError("\n".join(self.lines))


def fill(
    config: Any, defaults: Mapping[str, Any], networks: Mapping[str, Any], model: Any = None
) -> None:
    """Fill in, in place and in this order, what was left open.

    `defaults` are values by key, or functions of the configuration; of a section by network, such
    as `outer.*`, of the network's kind as well. `networks` are those that are trained, with their
    kinds; `model` is the recipe's `Model`, as it is unless somebody sets it.
    """
    for key, default in defaults.items():
        section, _, network = key.partition(".")
        if section in ("inner", "outer"):
            for name, kind in networks.items():
                if name not in value_at(config, section) and fnmatchcase(name, network):
                    made = default(config, kind) if callable(default) else copy.copy(default)
                    value_at(config, section)[name] = made
        elif value_at(config, key) == _open(config, key, model):
            put_at(config, key, default(config) if callable(default) else default)


def unmet(config: Any, uses: Uses, model: Any = None) -> list[str]:
    """Settings whose condition does not hold, a line each; for `model` see `fill`."""
    given = list(_given(config, model))
    return [
        f"{key} = {value!r} needs {need.mend if isinstance(need.mend, str) else need.mend(config)}"
        "; set that, or leave it out"
        for need in uses
        if isinstance(need, Needs)
        for key, value in given
        if _covers(need.key, key, value) and not need.holds(config, _network(key))
    ]


def effective(config: Any, uses: Uses) -> dict[str, Any]:
    """Settings, nested, but for those that are left open and could have no effect."""
    tree: dict[str, Any] = {}
    for key, value in leaves_of(config):
        if all(
            need.holds(config, _network(key))
            for need in uses
            if isinstance(need, Needs) and fnmatchcase(key, need.key)
        ):
            *sections, leaf = key.split(".")
            section = tree
            for name in sections:
                section = section.setdefault(name, {})
            section[leaf] = value
    return tree


def unused(
    config: Any, uses: Uses, defaults: Mapping[str, Any], optional: Sequence[str]
) -> list[str]:
    """Settings that a page does not follow: `h = 5 has no effect`, for whoever says with what.

    Of `optional`, what pages may declare; to set what the page's defaults hold is no mistake.
    """
    known = followed(uses, optional)
    return [
        f"{key} = {value!r} {'does not go' if '=' in entry else 'has no effect'}"
        for key, value in _given(config)
        for entry in optional
        if entry not in known and _covers(entry, key, value) and defaults.get(key, ...) != value
    ]


def followed(uses: Uses, optional: Sequence[str]) -> list[str]:
    """What of `optional` a page declares."""
    patterns = [use.key if isinstance(use, Needs) else use for use in uses]
    return [entry for entry in optional if any(fnmatchcase(entry, p) for p in patterns)]


def _given(config: Any, model: Any = None) -> Iterator[tuple[str, Any]]:
    """Settings that differ from what they are unless somebody sets them."""
    for key, value in leaves_of(config):
        if value != _open(config, key, model):
            yield key, value


def _open(config: Any, key: str, model: Any) -> Any:
    """What a setting is unless somebody sets it; as it is, if its recipe is not known."""
    if key.startswith("model."):
        return value_at(config if model is None else {"model": vars(model)}, key)
    head, _, leaf = key.rpartition(".")
    section = value_at(config, head)
    return None if isinstance(section, dict) else getattr(type(section)(), leaf)


def _covers(entry: str, key: str, value: Any) -> bool:
    pattern, equals, only = entry.partition("=")
    return fnmatchcase(key, pattern) and (not equals or str(value).partition(":")[0] == only)


def _network(key: str) -> str:
    parts = key.split(".")
    return parts[1] if len(parts) > 2 else ""
