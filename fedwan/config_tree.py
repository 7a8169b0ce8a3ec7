"""Configuration as written: nested values from words and YAML, and clear errors for what is wrong.

A schema is a dataclass of scalars, scalars or None, lists of text, sections (dataclasses), dicts
of sections (`inner`, by network) or of text (`init`), or open dicts (`model`). OmegaConf merges and
converts; here is what it does not say: the nearest key, what a value may be, all faults at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from fedwan.errors import ConfigError
from fedwan.names import closest, nearest

Section = TypeVar("Section")

_WANTED = {
    bool: "neither true nor false",
    int: "no whole number; write it like 20",
    float: "no number; write it like 0.5",
}
"""By kind of setting, what a value of another is."""

Tree = dict[str, Any]
"""Nested values by key, as they were written."""


def parse_words(words: Sequence[str], schema: type) -> Tree:
    """`key=value` words as nested values; a later word wins over an earlier one.

    Values are YAML, except where the schema wants text: `out=2024` is then no number.
    """
    tree = OmegaConf.create()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"argument {word!r} is no key=value; write it like steps=1000")
        is_text = kind_at(schema, key) is str
        if not text and not is_text:
            raise ConfigError(f"{key} has no value; give one, or null where that is one")
        try:
            if is_text:
                OmegaConf.update(tree, key, text)
            else:
                tree.merge_with_dotlist([word])
        except (OmegaConfBaseException, yaml.YAMLError):
            raise ConfigError(f"{key} = {text!r} cannot be parsed; put it in quotes") from None
    return typing.cast(Tree, OmegaConf.to_container(tree))


def read_yaml(path: Path) -> Tree:
    """The values in a YAML file."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = nearest(path.name, (file.name for file in path.parent.glob("*.y*ml")))
        raise ConfigError(
            f"config file {str(path)!r} {what}{near or '; give the path of a YAML file'}"
        )
    try:
        loaded = OmegaConf.load(path)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"config file {str(path)!r} cannot be read: {text}; mend it, or restore it from a copy"
        ) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {str(path)!r} holds no key: value lines; see README.md")
    return typing.cast(Tree, OmegaConf.to_container(loaded, resolve=False))


def overlay(base: Section, *trees: Mapping[str, Any]) -> Section:
    """A copy of a dataclass instance with trees put over it, later ones over earlier ones."""
    schema, merged, faults = type(base), OmegaConf.structured(base), []
    for path, value in [leaf for tree in trees for leaf in _leaves(tree, schema, [])]:
        key = ".".join(map(str, path))
        if value == "???":  # which OmegaConf takes for no value
            faults.append(f"{key} = '???' says nothing; give a value, or leave it out")
            continue
        is_one = isinstance(value, str) and "," not in value
        is_list = typing.get_origin(kind_at(schema, key)) is list
        try:
            merged.merge_with(nested(path, [value] if is_one and is_list else value))
        except OmegaConfBaseException as error:
            faults.append(_fault(key, value, schema, error))
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    try:
        return typing.cast(Section, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:  # of an interpolation
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _leaves(
    tree: Mapping[str, Any], kind: Any, above: list[str]
) -> Iterator[tuple[list[str], Any]]:
    """Values and their paths; none of a section with every line commented out."""
    for key, value in tree.items():
        path, inside = [*above, key], _kind_in(kind, key)
        if _is_group(inside) and isinstance(value, Mapping):
            yield from _leaves(value, inside, path)
        elif not _is_group(inside) or value is not None:
            yield path, value


def _fault(key: str, value: Any, schema: type, error: OmegaConfBaseException) -> str:
    """What is wrong with one value."""
    if isinstance(error, ConfigKeyError):
        if kind_at(schema, key) is not None:  # a key of a file, with its dots
            tree = nested(key.split("."), value)
            text = yaml.safe_dump(tree, default_flow_style=True, width=math.inf).strip()[1:-1]
            return f"unknown key {key!r} (= {value!r}); in a file, write it as {text}"
        return f"unknown key {key!r} (= {value!r}); {_meant(key, schema)}"
    kind = kind_at(schema, key)
    if not _is_group(kind):
        if isinstance(value, Mapping):
            return f"{key} is one value, and has no {', '.join(map(str, value))}; write {key}=VALUE"
        if typing.get_origin(kind) is list:
            return f"""{key} = {value!r} is no list; write it like '["one","two, with a comma"]'"""
        kinds = typing.get_args(kind) or (kind,)
        if wanted := [text for each, text in _WANTED.items() if each in kinds]:
            return f"{key} = {value!r} is {wanted[0]}"
        return f"{key}: {str(error).splitlines()[0]}"
    parent, _, name = key.rpartition(".")
    # A network's name may be left out, or an s.
    meant = {f"{parent}.NETWORK.{name}", f"{key}s"} & {*keys_of(schema)}
    near = f"; did you mean {min(meant)!r}?" if meant else ""
    holds = [each for each in keys_of(schema) if each.startswith(f"{key}.")] or [f"{key}.NAME"]
    return f"{key} = {value!r} is a section, not a setting; it holds {', '.join(holds)}{near}"


def _meant(key: str, schema: type) -> str:
    """Best within the section that the key names; of no section, the last part of any key."""
    head, _, leaf = key.rpartition(".")
    keys = {path.rpartition(".")[2]: path for path in reversed(keys_of(schema))}
    names, where = [*_hints(schema)], ""
    if head and _is_section(kind := kind_at(schema, head)):
        names, where = [*_hints(kind)], f"in {head!r} "
        keys = {name: f"{head}.{name}" for name in names}
    choice = closest(leaf, keys)
    return f"did you mean {keys[choice]!r}?" if choice else f"{where}there are {', '.join(names)}"


_hints = cache(typing.get_type_hints)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_group(kind: Any) -> bool:
    return _is_section(kind) or typing.get_origin(kind) is dict


def _kind_in(kind: Any, key: str) -> Any:
    if _is_section(kind):
        return _hints(kind).get(key)
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None


def kind_at(kind: Any, key: str) -> Any:
    """The type of the setting at a dotted key, None where there is none; of no key, the schema."""
    for part in key.split(".") if key else ():
        kind = _kind_in(kind, part)
    return kind


def keys_of(schema: type, prefix: str = "") -> list[str]:
    """Every key of a schema, `NETWORK` standing for any name: `inner.NETWORK.lr`."""
    paths: list[str] = []
    for key, kind in _hints(schema).items():
        if _is_section(kind):
            paths += keys_of(kind, f"{prefix}{key}.")
        elif _is_group(kind) and _is_section(typing.get_args(kind)[1]):
            paths += keys_of(typing.get_args(kind)[1], f"{prefix}{key}.NETWORK.")
        else:
            paths.append(f"{prefix}{key}")
    return paths


def leaves_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a configuration, with its key: `inner.generator.lr`."""
    items = config.items() if isinstance(config, Mapping) else vars(config).items()
    for key, value in items:
        if dataclasses.is_dataclass(value) or (isinstance(value, Mapping) and not prefix):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(path: Sequence[str], value: Any) -> Tree:
    """A value in nested mappings.

    >>> nested(["codec", "up"], "int4")
    {'codec': {'up': 'int4'}}
    """
    for part in reversed(path):
        value = {part: value}
    return typing.cast(Tree, value)


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted key; of no key, the configuration."""
    for part in key.split(".") if key else ():
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config


def put_at(config: Any, key: str, value: Any) -> None:
    """Set the value at a dotted key, in place."""
    head, _, leaf = key.rpartition(".")
    section = value_at(config, head)
    if isinstance(section, dict):
        section[leaf] = value
    else:
        setattr(section, leaf, value)


Valid = Callable[[Any], str]
"""Of a value: nothing, or what is wrong with it, as in `is out of range; choose 1 to 64`."""

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


def _in_range(holds: Callable[[Any], bool], text: str) -> Valid:
    return lambda value: "" if holds(value) else f"is out of range; choose {text}"


_LONGEST_LABEL = 63
"""Of a name in DNS, between its points."""


def _port_of(value: str) -> int:
    match = _ADDRESS.fullmatch(value)
    return int(match[1]) if match and int(match[1]) <= 65535 else -1


NOT_NEGATIVE = _in_range(lambda value: 0 <= value < math.inf, "0 or more")
POSITIVE = _in_range(lambda value: 0 < value < math.inf, "more than 0")
SHARE = _in_range(lambda value: 0 <= value < 1, "0 or more and less than 1")


def NAMED(value: str | list[str]) -> str:
    """Text, or a list of it, that says something."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        return "is no list of names; write it like '[one,two]'"
    if not all(name.isprintable() for name in names):
        return "has a line break, or another character that is not printed; leave it out"
    return "" if all(name.strip() for name in names) else "says nothing; give a name"


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


def one_of(*choices: str, counted: bool = False) -> Any:
    """A field that takes one of these words, the first unless somebody sets it.

    `counted` words but for the first may have a number of 1 or more behind a colon.
    """

    def valid(value: Any) -> str:
        word, colon, count = value.partition(":")
        if counted and colon and count.isdecimal() and int(count) and word in choices[1:]:
            return ""
        says = f"is none of {', '.join(filter(None, choices))}{nearest(word, choices)}"
        return "" if value in choices else says

    return field(default=choices[0], metadata={"valid": valid, "choices": choices})


def setting(default: Any, valid: Valid) -> Any:
    """A field of a section, or of a recipe's `Model`, with values of its own."""
    return field(default=default, metadata={"valid": valid})


def check_address(key: str, value: str) -> None:
    """Refuse what is no `host:port`, such as a name with an empty part."""
    labels = value.rpartition(":")[0].strip("[]").removesuffix(".").split(".")
    if _port_of(value) < 1 or not all(0 < len(label) <= _LONGEST_LABEL for label in labels):
        raise ConfigError(
            f"{key} = {value!r} is no host:port; write it like coordinator.example.com:"
            f"{7443 if key == 'door' else 7444}"
        )


def invalid(config: Any, usual: Valid | None = NOT_NEGATIVE) -> Iterator[str]:
    """A line for each value that its field does not take: the key, the value, what it may be.

    Numbers whose field does not say are `usual`.
    """
    for key, value in leaves_of(config):
        head, _, leaf = key.rpartition(".")
        section = value_at(config, head)
        if isinstance(section, dict):
            continue  # its recipe's to check
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        default = usual if is_number else None
        valid = section.__dataclass_fields__[leaf].metadata.get("valid", default)
        if valid is not None and value is not None and (fault := valid(value)):
            yield f"{key} = {value!r} {fault}"
