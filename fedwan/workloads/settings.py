"""What a workload's page may leave to the library, and how its settings are resolved and checked.

A page needs `build(config, device)` alone. It may have, besides:

    NETWORKS   kinds of the networks that are trained, by name, or a function of the configuration;
               else they are those that `build` makes optimisers for: adversarial if several,
               regression if one
    Model      a dataclass, the settings under `model.*`; else there are none
    USES       see `fedwan.uses`; what of `OPTIONAL` its steps follow, and conditions of `model.*`
    DEFAULTS   what takes the place of open settings, over those here
    PAIRS      whether it learns from pairs of an input and its target; None if from either
    check      a function of the resolved configuration, for what is truly special
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fedwan._config_tree import overlay
from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.data import check_data, pair_names, source_of
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.uses import Faults, fill, unmet, unused

if TYPE_CHECKING:
    from fedwan.workloads.base import NetworkKind, Workload

__all__ = [
    "OPTIONAL",
    "build_nowhere",
    "check_networks",
    "networks_of",
    "require_at_least",
    "require_each",
    "require_one_of",
    "require_parts",
    "resolve_page",
]

OPTIONAL = (
    *("site.precision", "site.precision=bf16-true", "site.accumulate", "site.recompute"),
    *("site.partition", "site.partition=weights", "site.partition=tensor_parallel"),
    *("data.labels", "inner.*.name=own"),
)
"""Settings that some workloads do not follow."""
_DEFAULTS: Mapping[str, Any] = {"data.batch": 32, "steps": 2000, "inner.*": InnerConfig()}


@dataclasses.dataclass
class _NoModel:
    """Of a page without settings of its own."""


class _AnyInner(dict[str, InnerConfig]):
    """An inner optimiser for whatever network a page makes."""

    def __missing__(self, name: str) -> InnerConfig:
        return InnerConfig()


def resolve_page(page: ModuleType, config: Config) -> Mapping[str, NetworkKind]:
    """Fill in what a workload's page has defaults for, and refuse what it does not follow."""
    faults = Faults()
    uses, defaults = getattr(page, "USES", ()), getattr(page, "DEFAULTS", {})
    model = getattr(page, "Model", _NoModel)
    for fault in unused(config, uses, defaults, OPTIONAL):
        faults.add([f"{fault} with workload {config.workload!r}; leave it out"])
    with faults.caught():
        config.model = _resolve_model(model, config.model)
    with faults.caught():
        check_data(config.data, config.sites)
        _require_pairs(config, getattr(page, "PAIRS", False))
    faults.tell()
    networks = networks_of(page, config)
    check_networks(config, networks, faults)
    with faults.caught():
        fill(config, defaults, networks, model())
        fill(config, _DEFAULTS, networks)
        faults.add(unmet(config, uses, model()))
        with faults.caught():
            getattr(page, "check", lambda _: None)(config)
        with faults.caught():
            require_parts(config)
        _check_warmup(config, faults)
    faults.tell()
    return networks


def networks_of(page: ModuleType, config: Config) -> Mapping[str, NetworkKind]:
    """The networks that a workload trains, and what kind each is."""
    networks = getattr(page, "NETWORKS", None)
    if networks is None:
        built = build_nowhere(page, dataclasses.replace(config, inner=_AnyInner(config.inner)))
        if built is None:
            raise ConfigError(
                f"workload {config.workload!r} says by no NETWORKS which networks it trains, and "
                "cannot be built without memory to learn it; give it NETWORKS"
            )
        names = list(built.optimizers)
        return dict.fromkeys(names, "adversarial" if len(names) > 1 else "regression")
    found: Mapping[str, NetworkKind] = networks(config) if callable(networks) else networks
    return found


def build_nowhere(page: ModuleType, config: Config) -> Workload | None:
    """The workload on torch's meta device, without memory; None if it must read its own values."""
    try:
        with torch.device("meta"):
            built: Workload = page.build(config, torch.device("meta"))
    except (RuntimeError, NotImplementedError):
        return None
    return built


def _resolve_model(model: type, given: dict[str, Any]) -> dict[str, Any]:
    """Every setting of the page's `Model`: given ones checked, the others at their default."""
    # Wrapped, so that an error names the key as the user wrote it: model.width.
    wrapper = dataclasses.make_dataclass(
        "Recipe", [("model", model, dataclasses.field(default_factory=model))]
    )
    settings: Any = getattr(overlay(wrapper(), {"model": given}), "model")  # noqa: B009
    return dataclasses.asdict(settings)


def check_networks(config: Config, networks: Collection[str], faults: Faults) -> None:
    """Refuse sections of networks that are not trained."""
    for section in ("init", "inner", "outer", "network"):
        faults.add(
            f"{section}.{network}: workload {config.workload!r} trains "
            f"{', '.join(networks)}{nearest(network, networks)}"
            for network in getattr(config, section)
            if network not in networks
        )
    faults.tell()


def _check_warmup(config: Config, faults: Faults) -> None:
    faults.add(
        f"inner.{network}.warmup_steps = {inner.warmup_steps} is more than the run's steps; choose "
        f"{config.steps} or less"
        for network, inner in config.inner.items()
        if inner.warmup_steps > config.steps
    )


def require_parts(config: Config, turns: int = 1) -> None:
    """Refuse a batch that cannot be computed in as many parts as asked."""
    site, batch = config.site, config.data.batch // turns
    num_shares = 1 if site.partition == "tensor_parallel" else site.processes
    parts = num_shares * site.accumulate
    if batch % parts:
        above = turns * (batch + -batch % parts)
        shared = f"site.processes={site.processes} with " if num_shares > 1 else ""
        raise ConfigError(
            f"{shared}site.accumulate={site.accumulate} does not divide the {batch} samples of a "
            f"step; set data.batch={above}"
        )


def _require_pairs(config: Config, pairs: bool | None) -> None:
    workload, name = config.workload, config.data.name
    is_pairs = source_of(config.data).inputs > 0
    if pairs and not is_pairs:
        raise ConfigError(
            f"data.name = {name!r} holds no pairs of input and target, which workload "
            f"{workload!r} learns from; set data.name={pair_names()[0]}"
        )
    if is_pairs and pairs is False:
        raise ConfigError(
            f"data.name = {name!r} holds pairs of input and target, which workload {workload!r} "
            f"does not learn from; set data.name={DataConfig().name}"
        )


def require_at_least(key: str, value: float, least: float) -> None:
    """Refuse a model setting that is too small, or no number."""
    if not least <= value < math.inf:
        raise ConfigError(f"{key} = {value!r} is out of range; choose {least} or more")


def require_each(model: object, **least: float) -> None:
    """`require_at_least` of several settings of a `Model`, by name."""
    for name, value in least.items():
        require_at_least(f"model.{name}", getattr(model, name), value)


def require_one_of(key: str, value: str, valid: Collection[str]) -> None:
    """Refuse a setting that is none of some words."""
    if value not in valid:
        raise ConfigError(f"{key} = {value!r} is none of {', '.join(valid)}{nearest(value, valid)}")
