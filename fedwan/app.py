"""Where recipes are found, `strategies/NAME.py` and `sites/NAME.py`, and what a run is.

The only place that imports recipes. It does so by name, so that the library depends on no strategy
and no workload, and a user's own recipe is as good as ours:

    workload=gan             sites/gan.py of the present folder, or the one that came with fedwan;
                             or what an installed package has under `fedwan.workloads` (entry point)
    workload=package.module  any module that is installed

Every process of a site or a coordinator runs in the folder that its service was started in, so that
all find the same. Flower's bundle carries no recipe.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import fedwan
from fedwan.config import COMMAND, Config, InnerConfig, merge
from fedwan.config_tree import parse_words, read_yaml
from fedwan.errors import ConfigError, FedwanError, place_of
from fedwan.files import absolute_path
from fedwan.names import named_function, nearest
from fedwan.uses import Faults

if TYPE_CHECKING:
    from fedwan.workloads.base import NetworkKind

_ENTRY_POINTS = frozenset({"server_app", "client_app"})
_GROUPS = {"sites": "fedwan.workloads", "strategies": "fedwan.strategies"}
_DOCS = {"sites": "docs/workloads.md", "strategies": "docs/strategies.md"}


def app_folders() -> list[Path]:
    """Folders whose recipes a run may use; the first that has one of a name provides it.

    The present folder, if it holds `sites/` or `strategies/`, and fedwan's own.
    """
    here, own = Path.cwd(), installed_app()
    is_app = any((here / folder).is_dir() for folder in _GROUPS)
    return [here, own] if is_app and here != own else [own]


def installed_app() -> Path:
    """The app that came with fedwan: the checkout, or `fedwan/_app` of an installed wheel."""
    package = Path(fedwan.__file__).resolve().parent
    for root in (package / "_app", package.parent):
        if (root / "strategies" / "server_app.py").is_file():
            return root
    raise ConfigError(f"{package} holds no app; install fedwan anew (pip install fedwan)")


def sources(config: Config) -> dict[str, str]:
    """SHA-256 of what a run's sites must have the same of, by name: recipes, and features."""
    modules = {f"strategy {config.strategy}": load_strategy(config.strategy)}
    if config.workload != COMMAND:
        modules[f"workload {config.workload}"] = load_workload(config.workload)
    texts = {name: Path(module.__file__ or "").read_bytes() for name, module in modules.items()}
    found = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    if config.eval.features:
        from fedwan.metrics.network import network_sha256  # torch comes with it

        found["eval.features"] = network_sha256(config.eval.features)
    return found


def load_workload(name: str) -> ModuleType:
    """Import a workload recipe; its parts are listed in `fedwan.workloads.base`."""
    return _load("workload", name, "sites")


def load_strategy(name: str) -> ModuleType:
    """Import a strategy recipe; its parts are listed in `fedwan.strategy`."""
    return _load("strategy", name, "strategies")


def num_experts(config: Config) -> int:
    """Copies of each network that a run trains, one a site; 0 where sites train the same one."""
    has_experts = getattr(load_strategy(config.strategy), "EXPERTS", False)
    return config.num_sites if has_experts else 0


def strategy_names() -> list[str]:
    """The strategies that are found by a plain name, those of users among them, in name order."""
    return _names("strategies")


def workload_names() -> list[str]:
    """The same of recipes."""
    return _names("sites")


def _load(key: str, name: str, folder: str) -> ModuleType:
    pages, what = _pages(folder), f"{key} = {name!r}"
    with told(f"{what} cannot be imported"):
        if name in pages:
            module = _import_page(what, name, folder, pages[name])
        elif plugins := entry_points(group=_GROUPS[folder]).select(name=name):
            module = _import_installed(what, next(iter(plugins)).module)
        elif "." in name and name.replace(".", "").isidentifier():
            module = _import_installed(what, name)
        else:
            names, others = _names(folder), [COMMAND] if key == "workload" else []
            mend = nearest(name, [*names, *others]) or (
                f"; a page of your own is {folder}/NAME.py in the folder that a service starts in"
            )
            more = "".join(f", nor {other}" for other in others)
            raise ConfigError(f"{what} is none of {', '.join(names)} in {folder}/{more}{mend}")
    if not hasattr(module, "build"):
        raise ConfigError(f"{what}: {module.__file__} defines no 'build'; see {_DOCS[folder]}")
    return module


def _names(folder: str) -> list[str]:
    return sorted({*_pages(folder), *entry_points(group=_GROUPS[folder]).names})


def has_own_data(config: Config) -> bool:
    """Whether the data come of a script or of a page's own `dataset`: nothing tells of what."""
    return config.workload == COMMAND or hasattr(load_workload(config.workload), "dataset")


def _pages(folder: str) -> dict[str, Path]:
    """The recipes of `sites` or `strategies` by name, and their files."""
    found: dict[str, Path] = {}
    for root in app_folders():
        for path in sorted((root / folder).glob("*.py")):
            if path.stem not in _ENTRY_POINTS and not path.stem.startswith("_"):
                found.setdefault(path.stem, path)
    return found


def _import_page(what: str, name: str, folder: str, path: Path) -> ModuleType:
    """The module `folder.name`, from the app folder that provides it.

    The package `folder` may be imported already, as from Flower's bundle: its path is extended, so
    that recipes find their neighbours by name as well.
    """
    roots = app_folders()
    for root in reversed(roots):
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    package = importlib.import_module(folder)
    if not hasattr(package, "__path__"):
        raise ConfigError(
            f"{what}: {package.__file__} hides the folder {folder}/ that has it; give that file "
            "another name"
        )
    places = [str(root / folder) for root in roots]
    package.__path__ = [*places, *(place for place in package.__path__ if place not in places)]
    module = importlib.import_module(f"{folder}.{name}")
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ConfigError(
            f"{what}: {path} is hidden by {module.__file__}, which was imported before it; "
            "give it another name"
        )
    return module


def _import_installed(what: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the recipe's own
        raise ConfigError(
            f"{what}: no module {error.name!r} is installed here; install the package that "
            "holds it at the coordinator and at every site"
        ) from None


@contextmanager
def told(what: str) -> Iterator[None]:
    """Tell what a page of somebody's own fails with in one line, with its place."""
    try:
        yield
    except (FedwanError, AssertionError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}{place_of(error)}"
        raise ConfigError(f"{what}: {text}") from error


def load_run(path: Path | None, overrides: Sequence[str]) -> Config:
    """A run's configuration from a file and `key=value` words, with the recipes' defaults under it.

    A word such as `outer.generator.lr=0.3` changes the learning rate alone: momentum stays what
    the strategy chose, not what `OuterConfig` starts with.
    """
    trees = [{} if path is None else read_yaml(path), parse_words(overrides, Config)]
    asked = merge(Config(), *trees)
    open_ones = dataclasses.replace(asked, inner={}, outer={})
    try:
        chosen = resolve(open_ones)
    except ConfigError:  # told below, with what is wrong besides
        chosen = open_ones
    # Defaults of one optimiser mean nothing to another, so that it starts with InnerConfig's own.
    named = {
        network: section["name"]
        for tree in trees
        for network, section in (tree.get("inner") or {}).items()
        if isinstance(section, Mapping) and "name" in section
    }
    inner = {
        name: own for name, own in chosen.inner.items() if named.get(name, own.name) == own.name
    }
    config = resolve(merge(dataclasses.replace(asked, inner=inner, outer=chosen.outer), *trees))
    # A run goes on with its config.yaml from other folders, too, and sites run in their own.
    if config.eval.features and named_function(config.eval.features) is None:
        config.eval.features = absolute_path(config.eval.features)
    config.init = {network: absolute_path(path) for network, path in config.init.items()}
    return config


def resolve(config: Config) -> Config:
    """A configuration with nothing left open: what the run's `config.yaml` will hold.

    Resolving twice changes nothing, so that a run can be resumed from its `config.yaml`.
    """
    config, faults = copy.deepcopy(config), Faults()
    workload = None
    if config.workload != COMMAND:
        with faults.caught():
            workload = load_workload(config.workload)
    with faults.caught():
        strategy = load_strategy(config.strategy)
    faults.tell()
    # Imported here: these need torch, which the command line does without until it has recipes.
    from fedwan.recipes import check_built, require_followed, require_script, resolve_strategy
    from fedwan.uses import fill

    what = f"strategy {config.strategy!r} cannot be resolved"
    if workload is None:
        require_script(strategy, config)
        fill(config, {"data.batch": 1, "eval.every": 200}, {})
        with told(what):  # what rests on no network is refused here, the rest by `complete`
            resolve_strategy(strategy, copy.deepcopy(config), {}, _strategies)
        return merge(config)
    from fedwan.workloads.settings import resolve_page

    networks = None
    with faults.caught(), told(f"workload {config.workload!r} cannot be resolved"):
        networks = resolve_page(workload, config)
    with faults.caught(), told(what):
        if networks is None:
            require_followed(strategy, config, _strategies)
        else:
            resolve_strategy(strategy, config, networks, _strategies)
    faults.tell()
    with told(what):
        built = strategy.build(config)
    if not hasattr(built, "contributes"):
        raise ConfigError(f"{strategy.__file__}: build returned {built!r:.60}, not a Strategy")
    check_built(config, workload, built)
    return merge(config)


def complete(config: Config, kinds: Mapping[str, NetworkKind], num_steps: int) -> Config:
    """A configuration with what a training script's own networks decide; others are complete.

    Coordinator and sites both call it, with the networks' kinds and the script's steps (0 for none)
    that the sites agreed on, and come to the same.
    """
    if config.workload != COMMAND:
        return config
    config = copy.deepcopy(config)
    config.steps = config.steps or num_steps
    if config.steps < 1:
        raise ConfigError(
            "steps has no default for a script; add steps=2000, or name them in its fedwan.join"
        )
    from fedwan.recipes import resolve_strategy
    from fedwan.workloads.settings import check_networks

    check_networks(config, kinds, Faults())
    for network in sorted(kinds):
        config.inner.setdefault(network, InnerConfig(name="own"))
    with told(f"strategy {config.strategy!r} cannot be resolved"):
        resolve_strategy(load_strategy(config.strategy), config, kinds, _strategies)
    return config


def _strategies() -> Mapping[str, ModuleType]:
    """Those that train one model: experts are no mend for a setting that has no effect."""
    from fedwan.recipes import declared

    pages: dict[str, ModuleType] = {}
    for name in strategy_names():
        with suppress(ConfigError):  # a broken page is told once it is asked for
            declared(page := load_strategy(name))
            pages[name] = page
    return {name: page for name, page in pages.items() if not getattr(page, "EXPERTS", False)}
