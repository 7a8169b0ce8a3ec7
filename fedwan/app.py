"""The app: the folder with `strategies/` and `sites/`, and how a run finds its recipes there.

The only place that imports recipes. It does so by name, so that the library depends on no strategy
and no workload, and a user's own recipe file is as good as ours.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import fedwan
from fedwan._config_tree import Tree, overlay, parse_words, read_yaml
from fedwan._recipe_checks import check_recipes
from fedwan.config import COMMAND, Config, InnerConfig, SiteConfig, half_lives, merge
from fedwan.errors import ConfigError
from fedwan.names import nearest

if TYPE_CHECKING:
    from fedwan.workloads.base import NetworkKind

__all__ = [
    "check_codecs",
    "complete",
    "find_app",
    "load_run",
    "load_strategy",
    "load_workload",
    "networks_of",
    "resolve",
    "resolve_workload",
    "sources",
    "strategy_names",
]

_ENTRY_POINTS = frozenset({"server_app", "client_app"})
_WORKLOAD_PARTS = ("NETWORKS", "Model", "resolve", "build")
_STRATEGY_PARTS = ("resolve", "build")


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


def networks_of(workload: ModuleType, config: Config) -> Mapping[str, NetworkKind]:
    """The networks that a workload recipe trains, and what kind each is.

    Args:
        workload: the recipe.
        config: its `model` with every setting.

    Raises:
        ConfigError: they depend on settings of which they cannot be learned.
    """
    networks = workload.NETWORKS
    found: Mapping[str, NetworkKind] = networks(config) if callable(networks) else networks
    return found


def load_strategy(name: str, root: Path | None = None) -> ModuleType:
    """Import the strategy recipe `strategies/NAME.py`, which has two functions.

    `resolve(config, networks)` fills in `outer.*` and `h`, and `build(config)` returns a
    `fedwan.coordinator.strategy.Strategy`.

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
    chosen = resolve(dataclasses.replace(asked, inner={}, outer={}))
    # Defaults of one optimiser mean nothing to another, so that it starts with InnerConfig's own.
    inner = {
        network: default
        for network, default in chosen.inner.items()
        if network not in asked.inner or _name_asked(trees, network, default.name) == default.name
    }
    base = dataclasses.replace(asked, inner=inner, outer=chosen.outer)
    return resolve(merge(base, *trees))


def resolve(config: Config) -> Config:
    """A configuration with nothing left open: what the run's `config.yaml` will hold.

    Resolving twice changes nothing, so that a run can be resumed from its `config.yaml`.

    Args:
        config: checked by `fedwan.config`; it is not changed.

    Raises:
        ConfigError: an unknown recipe, network or model setting, a setting without effect, or more
            fragments than the model has modules.
    """
    if config.workload == COMMAND:
        load_strategy(config.strategy)
        config = copy.deepcopy(config)
        config.data.batch = config.data.batch or 1
        return merge(config)
    workload, strategy = load_workload(config.workload), load_strategy(config.strategy)
    config = resolve_workload(config)
    networks = networks_of(workload, config)
    strategy.resolve(config, networks)
    assert set(config.inner) | set(config.outer) <= set(networks), "recipes add no network"
    check_recipes(config, workload, strategy)
    _fill_half_life(config, networks)
    return merge(config)


def complete(config: Config, kinds: Mapping[str, NetworkKind], num_steps: int) -> Config:
    """A configuration with what a training script's own networks decide; others are complete.

    Coordinator and sites both call it, with what the sites agreed on, and come to the same.

    Args:
        config: resolved; it is not changed.
        kinds: by trained network.
        num_steps: that the script asks for; 0 for none.

    Raises:
        ConfigError: a setting names no network of the script, does not fit its steps, or there is
            no number of steps.
    """
    if config.workload != COMMAND:
        return config
    config = copy.deepcopy(config)
    config.steps = config.steps or num_steps
    if config.steps < 1:
        raise ConfigError(
            "steps has no default for a script; add steps=2000, or name them in its fedwan.join"
        )
    _check_networks(config, kinds)
    for network in sorted(kinds):
        config.inner.setdefault(network, InnerConfig(name="own"))
    load_strategy(config.strategy).resolve(config, kinds)
    _fill_half_life(config, kinds)
    return config


def sources(config: Config) -> dict[str, str]:
    """SHA-256 of the source of a run's strategy and recipe, by name: sites must have the same."""
    modules = {f"strategy {config.strategy}": load_strategy(config.strategy)}
    if config.workload != COMMAND:
        modules[f"workload {config.workload}"] = load_workload(config.workload)
    return {
        name: hashlib.sha256(Path(module.__file__ or "").read_bytes()).hexdigest()
        for name, module in modules.items()
    }


def _fill_half_life(config: Config, networks: Collection[str]) -> None:
    """A tenth of the run, unless every network has a half-life of its own: then one of these."""
    own = half_lives(config)
    is_unused = own.keys() == set(networks)
    if config.ema.half_life == 0:
        tenth = config.steps * config.sites * config.data.batch / 10
        config.ema.half_life = next(iter(own.values())) if is_unused else tenth
    if is_unused and config.ema.half_life not in own.values():
        raise ConfigError(
            f"ema.half_life={config.ema.half_life:g} has no effect: every network has one of its "
            "own; leave it out"
        )


def resolve_workload(config: Config) -> Config:
    """A configuration in which only what the strategy's recipe fills in is left open.

    Args:
        config: checked by `fedwan.config`; it is not changed.

    Raises:
        ConfigError: see `resolve`.
    """
    config = copy.deepcopy(config)
    workload = load_workload(config.workload)
    check_codecs(config)
    _refuse_site(config, getattr(workload, "SITE", ()))
    config.model = _resolve_model(workload.Model, config.model)
    _check_networks(config, networks_of(workload, config))
    workload.resolve(config)
    return config


def _refuse_site(config: Config, followed: Collection[str]) -> None:
    """Refuse settings under `site.*` that the recipe's steps do not follow."""
    for name, unset in vars(SiteConfig()).items():
        value = getattr(config.site, name)
        if value != unset and name not in (*followed, "processes"):
            raise ConfigError(
                f"site.{name} = {value!r} has no effect: the steps of workload "
                f"{config.workload!r} do not follow it; leave it out"
            )
    for name, most, need, less in (
        ("partition", "weights", "a network's weights whole", "gradients"),
        ("partition", "tensor_parallel", "each layer in one process", "gradients"),
        ("precision", "bf16-true", "weights in fp32", "bf16-mixed"),
    ):
        if getattr(config.site, name) == most and f"{name}={most}" not in followed:
            raise ConfigError(
                f"site.{name} = {most!r} is more than the steps of workload {config.workload!r} "
                f"bear, which need {need}; set site.{name}={less}"
            )


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


def _check_networks(config: Config, networks: Collection[str]) -> None:
    for section in ("inner", "outer", "network"):
        for network in getattr(config, section):
            if network not in networks:
                raise ConfigError(
                    f"{section}.{network}: workload {config.workload!r} trains "
                    f"{', '.join(networks)}{nearest(network, networks)}"
                )


def check_codecs(config: Config) -> None:
    """Refuse codecs that do not exist, of the run or of a network.

    Raises:
        ConfigError: which key, and those that do.
    """
    # Imported here: codecs need torch, which the command line does without until it has recipes.
    from fedwan.codecs import codec_by_name

    named = {"codec.up": config.codec.up, "codec.down": config.codec.down}
    for network, special in config.network.items():
        named[f"network.{network}.codec_up"] = special.codec_up
        named[f"network.{network}.codec_down"] = special.codec_down
    for key, name in named.items():
        try:
            if name:
                codec_by_name(name)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None


def _resolve_model(model: type, given: Tree) -> Tree:
    """Every setting of the recipe's `Model`: given ones checked, the others at their default."""
    # Wrapped, so that an error names the key as the user wrote it: model.width.
    wrapper = dataclasses.make_dataclass(
        "Recipe", [("model", model, dataclasses.field(default_factory=model))]
    )
    settings = getattr(overlay(wrapper(), {"model": given}), "model")  # noqa: B009
    return dataclasses.asdict(settings)


def _name_asked(trees: Sequence[Tree], network: str, default: str) -> str:
    """The optimiser that the user named for a network, in the last tree that names one."""
    name = default
    for tree in trees:
        section = (tree.get("inner") or {}).get(network) or {}
        name = str(section.get("name", name))
    return name
