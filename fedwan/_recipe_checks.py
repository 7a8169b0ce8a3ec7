"""What a run's workload and strategy do not bear together, refused before anything starts.

What each of them follows by itself its page declares, see `fedwan.uses`. Here the networks are
built, without memory, to see what they consist of.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from fedwan.config import Config
from fedwan.uses import Faults

if TYPE_CHECKING:
    from fedwan.strategy import Strategy
    from fedwan.workloads.base import Workload

__all__ = ["check_recipes"]


def check_recipes(config: Config, workload: ModuleType, strategy: Strategy) -> None:
    """Refuse what does not go together.

    Args:
        config: with nothing left open but the moving average's half-life.
        workload: its recipe.
        strategy: as it is set.

    Raises:
        ConfigError: a line each: which settings, and the mend.
    """
    from fedwan.initial import check_initial

    faults = Faults()
    faults.add(_steps(config, workload, strategy))
    built = _build_if_needed(config, workload)
    if built is not None:
        faults.add(_muon(config, built))
        with faults.caught():
            check_initial(built.networks, config.init, config.excluded)
        with faults.caught():
            _cut(config, strategy, built)
    faults.tell()


def _steps(config: Config, workload: ModuleType, strategy: Strategy) -> Iterator[str]:
    """Networks that step before others, where one exchange has the gradients of all."""
    steps_apart = getattr(workload, "steps_apart", lambda _: False)
    if steps_apart(config) and strategy.contributes == "gradient":
        yield (
            f"strategy {config.strategy!r} exchanges the gradients of all networks at once, and as "
            f"it is set a network of workload {config.workload!r} steps before the others have "
            "theirs; set strategy=local_sgd h=1, under which weights are exchanged after every step"
        )


def _build_if_needed(config: Config, workload: ModuleType) -> Workload | None:
    """The workload without memory; None if nothing is to be seen, or it reads its own values."""
    has_muon = any(inner.name == "muon" for inner in config.inner.values())
    is_apart = any(special.h not in (0, config.h) for special in config.network.values())
    is_cut = is_apart or config.stream.fragments > 1
    if not (has_muon or is_cut or config.excluded or config.init):
        return None
    from fedwan.workloads.settings import build_nowhere

    return build_nowhere(workload, config)


def _muon(config: Config, built: Workload) -> Iterator[str]:
    """Muon of networks without matrices."""
    from fedwan.workloads.optim import is_matrix

    for network, inner in config.inner.items():
        params = built.networks[network].parameters()
        if inner.name == "muon" and not any(is_matrix(param.ndim) for param in params):
            key = f"inner.{network}.name"
            yield (
                f"{key} = 'muon' has no effect: {network} of workload {config.workload!r} has no "
                f"matrices, only convolutions; set {key}=adamw"
            )


def _cut(config: Config, strategy: Strategy, built: Workload) -> None:
    """Cut the model as sites will: they refuse the same, but each on its own, and too late.

    Raises:
        ConfigError: patterns of `exclude` match nothing, or there are fewer modules than fragments.
    """
    from fedwan.site.inner import InnerOptimizers
    from fedwan.state import layout_of
    from fedwan.workloads.home import staying_home

    trained = {name: built.networks[name] for name in built.optimizers}
    made = {name: optimizer for name, optimizer in built.optimizers.items() if optimizer}
    # Without memory some recipes make none: then all parameters count as held.
    is_known = len(made) == len(built.optimizers)
    held = InnerOptimizers(built.networks, made).held() if is_known else None
    home = staying_home(trained, held, config.excluded)
    strategy.fragments(layout_of(trained, home))
