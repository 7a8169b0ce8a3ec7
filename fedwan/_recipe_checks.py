"""Settings that a run's workload and strategy do not go with, refused before anything starts.

What a setting may be by itself is looked at in `fedwan._config_checks`. What needs torch is
imported where it is needed: the command line does without until it has recipes.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from fedwan.config import Config
from fedwan.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fedwan.state import Role
    from fedwan.strategy import Strategy
    from fedwan.workloads.base import Workload

__all__ = ["check_excluded", "check_recipes"]


def check_recipes(config: Config, workload: ModuleType, strategy: ModuleType) -> None:
    """Refuse what does not go together.

    Args:
        config: with nothing left open but the moving average's half-life.
        workload: its recipe.
        strategy: its recipe.

    Raises:
        ConfigError: which settings, and the mend.
    """
    _check_steps(config, workload, strategy)
    _check_initial(config, workload)
    _check_home(config, workload, strategy)
    _check_fragments(config, workload, strategy)
    _check_codecs(config, strategy)
    _check_recalibration(config, workload)
    _check_partition(config, strategy)
    _check_precision(config, strategy)
    _check_muon(config, workload, strategy)


def _check_steps(config: Config, workload: ModuleType, strategy: ModuleType) -> None:
    """Refuse networks that step before others where one exchange has the gradients of all."""
    steps_apart = getattr(workload, "steps_apart", None)
    if steps_apart is None or not steps_apart(config):
        return
    if strategy.build(config).contributes == "gradient":
        raise ConfigError(
            f"strategy {config.strategy!r} exchanges the gradients of all networks at once, and as "
            f"it is set a network of workload {config.workload!r} steps before the others have "
            "theirs; set strategy=local_sgd h=1, under which weights are exchanged after every step"
        )


def check_excluded(config: Config, strategy: Strategy) -> None:
    """Refuse tensors that stay at a site where the coordinator takes the sites' steps.

    Raises:
        ConfigError: it does, and there are some.
    """
    for network in config.excluded if strategy.contributes == "gradient" else ():
        raise ConfigError(
            f"network.{network}.exclude does not go with strategy {config.strategy!r}, under which "
            "the coordinator takes the sites' steps, of which a site's own layers would have "
            "none; leave it out, or set strategy=local_sgd h=1"
        )


def _check_initial(config: Config, workload: ModuleType) -> None:
    """Refuse files of initial weights that do not fit."""
    built = _build_nowhere(config, workload) if config.init else None
    if built is not None:
        from fedwan.initial import check_initial

        check_initial(built.networks, config.init, config.excluded)


def _check_home(config: Config, workload: ModuleType, strategy: ModuleType) -> None:
    """Refuse what is excluded where that cannot be, before sites do."""
    if config.excluded:
        check_excluded(config, strategy.build(config))
        built = _build_nowhere(config, workload)
        if built is not None:
            _home(config, built)


def _check_fragments(config: Config, workload: ModuleType, strategy: ModuleType) -> None:
    """Cut the model as the sites will: they refuse the same, but each on its own, and too late.

    Its networks are built on torch's meta device, without memory. A recipe that cannot be built
    there, since it reads its own values, is left to the sites.
    """
    apart = [name for name, special in config.network.items() if special.h not in (0, config.h)]
    if config.stream.fragments < 2 and not apart:
        return
    built = _build_nowhere(config, workload)
    if built is None:
        return
    from fedwan.state import layout_of

    layout = layout_of(_trained(built), _home(config, built))
    fragments = strategy.build(config).fragments(layout)
    if apart and all(fragment.times == 1 for fragment in fragments):
        raise ConfigError(
            f"network.{apart[0]}.h={config.network[apart[0]].h} has no effect: strategy "
            f"{config.strategy!r} has all networks travel together; leave it out, or set "
            "strategy=diloco"
        )


def _check_codecs(config: Config, strategy: ModuleType) -> None:
    """Refuse codecs of networks' own where a recipe does not ask for them (`recipes.codec`)."""
    for network, special in config.network.items():
        for way in ("up", "down"):
            name = getattr(special, f"codec_{way}")
            if name and getattr(strategy.build(config), way).of(network).name != name:
                raise ConfigError(
                    f"network.{network}.codec_{way}={name} has no effect: strategy "
                    f"{config.strategy!r} codes all networks alike; set codec.{way}={name}"
                )


def _check_recalibration(config: Config, workload: ModuleType) -> None:
    """Refuse statistics to be taken anew where no network keeps any."""
    built = _build_nowhere(config, workload) if config.eval.recalibrate else None
    if built is not None:
        from fedwan.site.recalibrate import normalised_layers

        if not normalised_layers(_trained(built)):
            raise ConfigError(
                f"eval.recalibrate={config.eval.recalibrate} has no effect: workload "
                f"{config.workload!r} has no batch norm; leave it out"
            )


def _check_partition(config: Config, strategy: ModuleType) -> None:
    """Refuse to share out what sites do not have: moments, where their optimisers never step."""
    if config.site.partition == "none":
        return
    from fedwan.workloads.moments import has_moments

    if config.site.partition == "optimizer" and not any(map(has_moments, config.inner.values())):
        raise ConfigError(
            "site.partition = 'optimizer' has no effect on sgd without momentum, which has no "
            "moments; leave it out, or set site.partition=gradients"
        )
    built = strategy.build(config)
    if built.contributes == "gradient" and built.clock == "samples":
        raise ConfigError(
            f"site.partition = {config.site.partition!r} has no effect: under strategy "
            f"{config.strategy!r} the coordinator steps the optimisers; leave it out"
        )
    if config.site.cuts_weights and config.eval.recalibrate:
        raise ConfigError(
            f"eval.recalibrate = {config.eval.recalibrate} takes steps that a site's leader takes "
            f"alone, which has no network of its own under site.partition={config.site.partition}; "
            "leave one of them out"
        )
    if config.site.cuts_weights and config.site.compile:
        raise ConfigError(
            f"site.compile = True is not followed with site.partition={config.site.partition}, "
            "under which no process has whole weights; leave one of them out"
        )


def _check_muon(config: Config, workload: ModuleType, strategy: ModuleType) -> None:
    """Refuse Muon where there are no matrices, no whole ones, or steps of it must agree."""
    for network in (name for name, inner in config.inner.items() if inner.name == "muon"):
        key = f"inner.{network}.name"
        if config.site.cuts_weights:
            raise ConfigError(
                f"{key} = 'muon' needs whole matrices, of which no process has one under "
                f"site.partition={config.site.partition}; set {key}=adamw or "
                "site.partition=gradients"
            )
        if strategy.build(config).contributes == "gradient":
            raise ConfigError(
                f"{key} = 'muon' does not go with strategy {config.strategy!r}, under which the "
                "coordinator takes the sites' steps itself: products of matrices differ between "
                f"its processor and their GPUs; set {key}=adamw, or strategy=local_sgd h=1"
            )
        from fedwan.workloads.muon import is_matrix

        built = _build_nowhere(config, workload)
        params = [] if built is None else list(built.networks[network].parameters())
        if params and not any(is_matrix(param.ndim) for param in params):
            raise ConfigError(
                f"{key} = 'muon' has no effect: {network} of workload {config.workload!r} has no "
                f"matrices, only convolutions; set {key}=adamw"
            )


def _check_precision(config: Config, strategy: ModuleType) -> None:
    """Refuse weights in bf16 where the coordinator has to follow them to the last bit."""
    if config.site.precision == "bf16-true" and strategy.build(config).contributes == "gradient":
        raise ConfigError(
            f"site.precision = 'bf16-true' does not go with strategy {config.strategy!r}, under "
            "which the coordinator takes the sites' steps itself, in fp32; set "
            "site.precision=bf16-mixed, or strategy=local_sgd h=1"
        )


def _build_nowhere(config: Config, workload: ModuleType) -> Workload | None:
    """The workload without memory; None if the recipe must read its own values."""
    import torch

    try:
        with torch.device("meta"):
            built: Workload = workload.build(config, torch.device("meta"))
    except RuntimeError:
        return None
    return built


def _trained(built: Workload) -> dict[str, nn.Module]:
    return {name: built.networks[name] for name in built.optimizers}


def _home(config: Config, built: Workload) -> dict[str, Role]:
    from fedwan.site.inner import InnerOptimizers
    from fedwan.workloads.home import staying_home

    held = InnerOptimizers(built.networks, built.optimizers).held()
    return staying_home(_trained(built), held, config.excluded)
