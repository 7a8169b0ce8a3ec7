"""The app: the folder with `strategies/` and `sites/`, and how a run finds its recipes there.

The only place that imports recipes. It does so by name, so that the library depends on no strategy
and no workload, and a user's own recipe file is as good as ours.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import fedwan
from fedwan._config_tree import Tree, parse_words, read_yaml
from fedwan._recipe_checks import check_recipes
from fedwan.config import Config, merge
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.uses import Faults

__all__ = [
    "check_codecs",
    "find_app",
    "load_run",
    "load_strategies",
    "load_strategy",
    "load_workload",
    "resolve",
    "resolve_workload",
    "strategy_names",
]

_ENTRY_POINTS = frozenset({"server_app", "client_app"})
_WORKLOAD_PARTS = _STRATEGY_PARTS = ("build",)


def find_app() -> Path:
    """The folder that holds `strategies/` and `sites/`.

    A process that Flower started already runs code of an app: that one. Otherwise the present
    folder, or the one that the fedwan package lies in (a checkout).

    Raises:
        ConfigError: there is none.
    """
    for name in ("strategies", "sites"):
        folders = getattr(sys.modules.get(name), "__path__", None)
        if folders and _is_app(root := Path(next(iter(folders))).parent):
            return root
    for root in (Path.cwd(), Path(fedwan.__file__).resolve().parents[1]):
        if _is_app(root):
            return root
    raise ConfigError(
        f"no app in {Path.cwd()}: it holds no strategies/ and sites/; "
        "change to a checkout of fedwan, or to your own app's folder"
    )


def load_workload(name: str, root: Path | None = None) -> ModuleType:
    """Import the workload recipe `sites/NAME.py`; its parts are listed in `fedwan.workloads.base`.

    Args:
        name: the recipe.
        root: the app's folder; found by `find_app` if not given.

    Raises:
        ConfigError: there is no such recipe, or it lacks a part.
    """
    return _load("workload", name, "sites", _WORKLOAD_PARTS, root)


def load_strategy(name: str, root: Path | None = None) -> ModuleType:
    """Import the strategy recipe `strategies/NAME.py`; its parts are listed in `fedwan.strategy`.

    Args:
        name: the recipe.
        root: the app's folder; found by `find_app` if not given.

    Raises:
        ConfigError: there is no such recipe, or it lacks a part.
    """
    return _load("strategy", name, "strategies", _STRATEGY_PARTS, root)


def strategy_names(root: Path | None = None) -> list[str]:
    """The strategies that the app holds, those of users among them, in name order.

    Args:
        root: the app's folder; found by `find_app` if not given.

    Raises:
        ConfigError: there is no app.
    """
    return _recipes((root or find_app()) / "strategies")


def load_strategies() -> Mapping[str, ModuleType]:
    """All strategies, by name.

    Raises:
        ConfigError: there is no app.
    """
    return {name: load_strategy(name) for name in strategy_names()}


def load_run(path: Path | None, overrides: Sequence[str]) -> Config:
    """A run's configuration from a file and `key=value` words, with the recipes' defaults under it.

    A word such as `outer.generator.lr=0.3` changes the learning rate alone: momentum stays what
    the strategy chose, not what `OuterConfig` starts with.

    Args:
        path: the YAML file, or None.
        overrides: the words.

    Raises:
        ConfigError: see `fedwan.config.load` and `resolve`.
    """
    trees = [{} if path is None else read_yaml(path), parse_words(overrides, Config)]
    asked = merge(Config(), *trees)
    chosen = _defaults(asked)
    # Defaults of one optimiser mean nothing to another, so that it starts with InnerConfig's own.
    inner = {
        network: default
        for network, default in chosen.inner.items()
        if network not in asked.inner or _name_asked(trees, network, default.name) == default.name
    }
    base = dataclasses.replace(asked, inner=inner, outer=chosen.outer)
    return resolve(merge(base, *trees))


def _defaults(asked: Config) -> Config:
    """The optimisers that the recipes choose; none of what is asked for that cannot be resolved."""
    try:
        return resolve(dataclasses.replace(asked, inner={}, outer={}))
    except ConfigError:
        return dataclasses.replace(asked, inner={}, outer={})


def resolve(config: Config) -> Config:
    """A configuration with nothing left open: what the run's `config.yaml` will hold.

    Resolving twice changes nothing, so that a run can be resumed from its `config.yaml`.

    Args:
        config: checked by `fedwan.config`; it is not changed.

    Raises:
        ConfigError: a line each: an unknown recipe, network or model setting, a setting without
            effect, or more fragments than the model has modules.
    """
    config, faults = copy.deepcopy(config), Faults()
    with faults.caught():
        workload = load_workload(config.workload)
    with faults.caught():
        strategy = load_strategy(config.strategy)
    faults.tell()
    # Imported here: these need torch, which the command line does without until it has recipes.
    from fedwan.recipes import require_followed, resolve_strategy
    from fedwan.workloads.settings import resolve_page

    with faults.caught():
        check_codecs(config)
    networks = None
    with faults.caught():
        networks = resolve_page(workload, config)
    with faults.caught():
        if networks is None:
            require_followed(strategy, config, load_strategies)
        else:
            resolve_strategy(strategy, config, networks, load_strategies)
    faults.tell()
    check_recipes(config, workload, strategy.build(config))
    tenth = config.steps * config.sites * config.data.batch / 10
    config.ema.half_life = config.ema.half_life or tenth
    return merge(config)


def resolve_workload(config: Config) -> Config:
    """A configuration in which only what the strategy's recipe fills in is left open.

    Args:
        config: checked by `fedwan.config`; it is not changed.

    Raises:
        ConfigError: see `resolve`.
    """
    from fedwan.workloads.settings import resolve_page

    config = copy.deepcopy(config)
    check_codecs(config)
    resolve_page(load_workload(config.workload), config)
    return config


def _is_app(root: Path) -> bool:
    return (root / "strategies").is_dir() and (root / "sites").is_dir()


def _load(key: str, name: str, folder: str, parts: Sequence[str], root: Path | None) -> ModuleType:
    root = (root or find_app()).resolve()
    path = root / folder / f"{name}.py"
    names = _recipes(root / folder)
    if name not in names:
        near = nearest(name, names)
        raise ConfigError(f"{key} = {name!r} is none of {', '.join(names)} in {folder}/{near}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = _import(folder, name)
    if module is None or Path(module.__file__ or "").resolve() != path.resolve():
        where = getattr(sys.modules.get(folder), "__file__", None) or "elsewhere"
        raise ConfigError(
            f"{key} = {name!r}: {path} is hidden by another package {folder!r} ({where}); "
            f"see that {folder}/ has an __init__.py, and start fedwan from {root}"
        )
    for part in parts:
        if not hasattr(module, part):
            raise ConfigError(f"{key} = {name!r}: {path} defines no {part!r}; see docs/")
    return module


def _import(folder: str, name: str) -> ModuleType | None:
    """The module, or None if the package of that name has none; a recipe's own errors pass."""
    try:
        return importlib.import_module(f"{folder}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"{folder}.{name}":
            return None
        raise


def _recipes(folder: Path) -> list[str]:
    stems = sorted(path.stem for path in folder.glob("*.py"))
    return [stem for stem in stems if stem not in _ENTRY_POINTS and not stem.startswith("_")]


def check_codecs(config: Config) -> None:
    """Refuse codecs that do not exist.

    Raises:
        ConfigError: which key, and those that do.
    """
    # Imported here: codecs need torch, which the command line does without until it has recipes.
    from fedwan.codecs import codec_by_name

    faults = Faults()
    for key in ("codec.up", "codec.down"):
        if name := getattr(config.codec, key.removeprefix("codec.")):
            try:
                codec_by_name(name)
            except ConfigError as error:
                faults.add([f"{key}: {error}"])
    faults.tell()


def _name_asked(trees: Sequence[Tree], network: str, default: str) -> str:
    """The optimiser that the user named for a network, in the last tree that names one."""
    name = default
    for tree in trees:
        section = (tree.get("inner") or {}).get(network) or {}
        name = str(section.get("name", name))
    return name
