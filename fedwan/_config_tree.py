"""Configuration as written: words and YAML into nested values, and wrong keys into clear errors.

A schema is a dataclass whose fields are scalars, scalars or None (null leaves the setting open),
lists of text, sections (dataclasses), dicts of sections (`inner`, by network) or of text (`init`),
or open dicts (`model`, which its recipe checks).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedwan.errors import ConfigError
from fedwan.names import closest

__all__ = [
    "Tree",
    "keys_of",
    "overlay",
    "parse_words",
    "read_yaml",
]

Section = TypeVar("Section")

Tree = dict[str, Any]
"""Nested values by key, as they were written."""

_KIND_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", ", like 20"),
    float: ("a number", ", like 0.5"),
    str: ("text", ""),
    bool: ("true or false", ""),
}


def parse_words(words: Sequence[str], schema: type) -> Tree:
    """`key=value` words as nested values; a later word wins over an earlier one.

    Values are YAML, except where the schema wants text: `out=2024` is then no number.

    Raises:
        ConfigError: a word without `=` or key, or a value that is no YAML.
    """
    tree: Tree = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"argument {word!r} is no key=value; write it like steps=1000")
        *sections, leaf = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"{key} = {text!r}, but {section!r} was given a value before it")
        branch[leaf] = _parse_value(key, text, _kind_at(schema, key))
    return tree


def _parse_value(key: str, text: str, kind: Any) -> Any:
    if not text and _may_be_open(kind):
        raise _type_error(key, None, kind)  # whoever wants to leave it open says null
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[call-overload, index]
    except (OmegaConfBaseException, yaml.YAMLError):
        if kind is str:
            return text
        raise ConfigError(f"{key} = {text!r} cannot be parsed; put it in quotes") from None
    return value if kind is not str or isinstance(value, str) else text


def read_yaml(path: Path) -> Tree:
    """The values in a YAML file.

    Raises:
        ConfigError: the file is missing, cannot be read, or holds no mapping.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        mend = "give the path of a YAML file"
        if "=" in path.name:
            mend += ", and words such as this one after it (`fedwan demo` takes words alone)"
        raise ConfigError(f"config file {str(path)!r} {what}; {mend}")
    try:
        loaded = OmegaConf.load(path)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"config file {str(path)!r} cannot be read: {text}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {str(path)!r} holds no key: value lines; see README.md")
    return typing.cast(Tree, OmegaConf.to_container(loaded, resolve=False))


def overlay(base: Section, *trees: Mapping[str, Any]) -> Section:
    """A copy of a dataclass instance with trees put over it, later ones over earlier ones.

    Raises:
        ConfigError: a line each: an unknown key (the text names the nearest), a value of the wrong
            type, or a section where a value belongs and the other way round.
    """
    schema = type(base)
    faults: list[str] = []
    checked = [_check_section(tree, schema, "", schema, faults) for tree in trees]
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(base), *checked)
        return typing.cast(Section, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise _explain(error, checked, schema) from None


def _explain(error: OmegaConfBaseException, trees: Sequence[Tree], schema: type) -> ConfigError:
    """OmegaConf's complaint as a line of ours, with the value as the user wrote it."""
    path = error.full_key or ""
    for tree in reversed(trees):
        value: Any = tree
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str) and "${" in value:
            return ConfigError(f"{path} = {value!r} refers to nothing; write the value itself")
        if value is not None:
            return _type_error(path, value, _kind_at(schema, path))
    text = " ".join(str(error).split())
    return ConfigError(f"the configuration cannot be read: {text}")


def _check_section(
    tree: Mapping[str, Any], section: type, prefix: str, schema: type, faults: list[str]
) -> Tree:
    """A section without what is wrong in it, which is noted in `faults`."""
    kinds = typing.get_type_hints(section)
    checked: Tree = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        try:
            if key not in kinds:
                raise _key_error(path, value, schema)
            checked[key] = _check_value(path, value, kinds[key], schema, faults)
        except ConfigError as error:
            faults.append(str(error))
    return checked


def _check_value(path: str, value: Any, kind: Any, schema: type, faults: list[str]) -> Any:
    if _is_section(kind):
        inside = _as_mapping(value, path, kind, schema)
        return _check_section(inside, kind, f"{path}.", schema, faults)
    if typing.get_origin(kind) is dict:
        mapping = _as_mapping(value, path, kind, schema)
        item = typing.get_args(kind)[1]
        if not _is_section(item):
            for name, part in mapping.items() if item is str else ():
                _check_leaf(f"{path}.{name}", part, item)
            return mapping
        return {
            name: _check_value(f"{path}.{name}", part, item, schema, faults)
            for name, part in mapping.items()
        }
    _check_leaf(path, value, kind)
    return value


def _check_leaf(path: str, value: Any, kind: Any) -> None:
    if typing.get_origin(kind) is list:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{path} = {value!r} is no list of names; write it like [paris,rome]")
    elif value is None and _may_be_open(kind):
        return
    elif value is None or isinstance(value, Mapping | list):
        raise _type_error(path, value, kind)
    elif isinstance(value, bool) is not (_when_given(kind) is bool):
        # YAML reads `off` as false: as text that would silently become "False".
        raise _type_error(path, value, kind)
    elif _when_given(kind) in (int, float) and isinstance(value, str) and "${" not in value:
        try:
            _when_given(kind)(value)
        except ValueError:
            raise _type_error(path, value, kind) from None


def _as_mapping(value: Any, path: str, kind: Any, schema: type) -> Mapping[str, Any]:
    if value is None:  # A section with every line commented out.
        return {}
    if isinstance(value, Mapping):
        return value
    section = kind if _is_section(kind) else typing.get_args(kind)[1]
    keys = list(typing.get_type_hints(section)) if _is_section(section) else ["NAME"]
    between = "" if _is_section(kind) or not _is_section(section) else "NETWORK."
    choices = ", ".join(f"{path}.{between}{key}" for key in keys)
    parent, _, name = path.rpartition(".")
    near = ""
    if parent and name in keys:  # taken for a network's name
        near = f"; did you mean '{parent}.NETWORK.{name}'?"
    elif not parent and _kind_at(schema, f"{path}s"):
        near = f"; did you mean '{path}s'?"
    raise ConfigError(f"{path} = {value!r} is a section, not a setting; it holds {choices}{near}")


def _key_error(path: str, value: Any, schema: type) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    suggestion = _nearest_key(path, schema)
    mend = f"did you mean {suggestion!r}?" if suggestion else _list_keys(path, schema)
    return ConfigError(f"unknown key {path!r} (= {value!r}); {mend}")


def _type_error(path: str, value: Any, kind: Any) -> ConfigError:
    """The error for a value of the wrong type."""
    wanted, example = _KIND_WORDS.get(_when_given(kind), ("a value of this kind", ""))
    if value is None:
        return ConfigError(f"{path} has no value; give {wanted}{example}")
    mend = "put it in quotes" if kind is str and isinstance(value, bool) else f"give one{example}"
    return ConfigError(f"{path} = {value!r} is not {wanted}; {mend}")


def _kind_at(schema: type, path: str) -> Any:
    """The type of the setting at a dotted path, or None where the schema has none."""
    kind: Any = schema
    for key in path.split("."):
        if _is_section(kind):
            kind = typing.get_type_hints(kind).get(key)
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        else:
            return None
    return kind


def _may_be_open(kind: Any) -> bool:
    return isinstance(kind, UnionType) and NoneType in typing.get_args(kind)


def _when_given(kind: Any) -> Any:
    """`int` for `int | None`; any other type as it is."""
    if not _may_be_open(kind):
        return kind
    (given,) = (part for part in typing.get_args(kind) if part is not NoneType)
    return given


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _nearest_key(path: str, schema: type) -> str | None:
    """Best within the section that the path names; else any key whose last part is like it."""
    head, _, leaf = path.rpartition(".")
    siblings = _keys_in(schema, head)
    if choice := closest(leaf, siblings):
        return f"{head}.{choice}" if head else choice
    leaves: dict[str, str] = {}
    for key in keys_of(schema):
        leaves.setdefault(key.rpartition(".")[2], key)
    if choice := closest(leaf, leaves):
        return leaves[choice]
    return None


def _list_keys(path: str, schema: type) -> str:
    head = path.rpartition(".")[0]
    keys = _keys_in(schema, head)
    where = f"in {head!r} there are" if keys and head else "there are"
    return f"{where} {', '.join(keys or _keys_in(schema, ''))}"


def _keys_in(schema: type, head: str) -> list[str]:
    kind = _kind_at(schema, head) if head else schema
    return list(typing.get_type_hints(kind)) if _is_section(kind) else []


def keys_of(schema: type, prefix: str = "") -> list[str]:
    """Every key of a schema, `NETWORK` standing for any name: `inner.NETWORK.lr`."""
    paths: list[str] = []
    for key, kind in typing.get_type_hints(schema).items():
        if _is_section(kind):
            paths += keys_of(kind, f"{prefix}{key}.")
        elif typing.get_origin(kind) is dict and _is_section(typing.get_args(kind)[1]):
            paths += keys_of(typing.get_args(kind)[1], f"{prefix}{key}.NETWORK.")
        else:
            paths.append(f"{prefix}{key}")
    return paths
