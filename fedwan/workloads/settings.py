"""How a workload page's settings are resolved and checked; its parts: `fedwan.workloads.base`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fedwan.config import Config, InnerConfig
from fedwan.config_tree import invalid, overlay
from fedwan.data.sources import SOURCES, check_data, num_labels, source_of
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.uses import Faults, Needs, fill, unmet, unused

if TYPE_CHECKING:
    from fedwan.workloads.base import NetworkKind
    from fedwan.workloads.descent import Descent

OPTIONAL = (
    *("site.precision", "site.accumulate", "site.recompute"),
    *("site.partition", "site.partition=weights"),
    *("data.labels", "inner.*.name=own", "privacy.epsilon"),
)
"""Settings that some workloads do not follow: privacy of samples, that of sites asks nothing."""
_DEFAULTS: Mapping[str, Any] = {
    **{"data.batch": 32, "steps": 2000, "inner.*": InnerConfig()},
    # Samples cost passes, not gradients, but many of them: ten times a run is seldom enough.
    **{"eval.every": lambda config: max(200, config.steps // 10), "eval.num": 0},
}
_NEEDS = (
    Needs(
        "model.conditional",
        lambda c, _: num_labels(c) > 1,
        lambda c: "data.classes=cat,dog" + (" or data.labels=site" if c.num_sites > 1 else ""),
    ),
)
"""Of every page whose `Model` has the setting."""
_NoModel = dataclasses.make_dataclass("_NoModel", [])


def resolve_page(page: ModuleType, config: Config) -> Mapping[str, NetworkKind]:
    """Fill in what a workload's page has defaults for, and refuse what it does not follow."""
    faults = Faults()
    uses, defaults = getattr(page, "USES", ()), getattr(page, "DEFAULTS", {})
    model = getattr(page, "Model", _NoModel)
    of_sites = config.privacy.is_of("site")
    optional = [key for key in OPTIONAL if not (of_sites and key == "privacy.epsilon")]
    for fault in unused(config, uses, defaults, optional):
        faults.add([f"{fault} with workload {config.workload!r}; leave it out"])
    with faults.caught():
        config.model = _resolve_model(model, config.model, faults)
    with faults.caught():
        check_data(config.data)
        _require_pairs(config, getattr(page, "PAIRS", False))
    faults.tell()
    networks = networks_of(page, config)
    check_networks(config, networks, faults)
    with faults.caught():
        fill(config, defaults, networks, model())
        fill(config, _DEFAULTS, networks)
        faults.add(unmet(config, (*uses, *_NEEDS), model()))
        for check in (getattr(page, "check", lambda _: None), require_parts):
            with faults.caught():
                check(config)
    faults.tell()
    return networks


def networks_of(page: ModuleType, config: Config) -> Mapping[str, NetworkKind]:
    """The networks that a workload trains, and what kind each is."""
    networks: Mapping[str, NetworkKind] | None = getattr(page, "NETWORKS", None)
    if networks is not None:
        return networks
    any_inner = defaultdict(InnerConfig, config.inner)
    built = build_nowhere(page, dataclasses.replace(config, inner=any_inner))
    if built is None:
        raise ConfigError(
            f"workload {config.workload!r} says by no NETWORKS which networks it trains, and "
            "cannot be built without memory to learn it; give it NETWORKS"
        )
    names = list(built.optimizers)
    return dict.fromkeys(names, "adversarial" if len(names) > 1 else "regression")


def build_nowhere(page: ModuleType, config: Config) -> Descent | None:
    """The workload on torch's meta device, without memory; None if it must read its own values."""
    try:
        with torch.device("meta") as meta:
            return page.build(config, meta)  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):
        return None


def _resolve_model(model: type, given: dict[str, Any], faults: Faults) -> dict[str, Any]:
    """Every setting of the page's `Model`: given ones checked, the others at their default."""
    # Wrapped, so that an error names the key as the user wrote it: model.width.
    default = dataclasses.field(default_factory=model)
    wrapper = dataclasses.make_dataclass("Recipe", [("model", model, default)])
    settings: Any = overlay(wrapper(), {"model": given})
    faults.add(invalid(settings, usual=None))
    return dataclasses.asdict(settings.model)


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


def require_parts(config: Config) -> None:
    """Refuse a batch that cannot be computed in as many parts as asked."""
    site, batch = config.site, config.data.batch
    parts = site.accumulate * site.processes
    if batch % parts:
        raise ConfigError(
            f"data.batch={batch} cannot be shared out evenly among site.accumulate="
            f"{site.accumulate} and site.processes={site.processes}; set "
            f"data.batch={batch + -batch % parts}"
        )


def _require_pairs(config: Config, pairs: bool | None) -> None:
    is_pairs = source_of(config.data).inputs > 0
    if pairs is None or is_pairs == pairs:
        return
    holds, does = ("", "does not learn") if is_pairs else ("no ", "learns")
    mend = next(s.name for s in SOURCES.values() if bool(s.inputs) is bool(pairs))
    own = "pairs" if pairs else "folder"
    raise ConfigError(
        f"data.name = {config.data.name!r} holds {holds}pairs of input and target, which workload "
        f"{config.workload!r} {does} from; set data.name={mend}, or "
        f"data.name={own} for files of yours"
    )
