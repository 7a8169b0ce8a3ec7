"""A LightningModule's own learning-rate schedulers, which follow the run.

A scheduler stands where so many of its steps lead; a site that goes on elsewhere in the run, since
it was away, takes them anew. So a rate is a function of the run's step, as everywhere.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedwan.errors import ConfigError

__all__ = ["Schedules", "configure"]


def configure(module: Any, package: str) -> tuple[list[Any], list[Any]]:
    """A module's optimisers, and its schedulers with when to step them.

    Args:
        module: a LightningModule.
        package: of Lightning, whose own reading of `configure_optimizers` it is.

    Raises:
        ConfigError: the module returns something else, or rates that follow a measurement.
    """
    parse = importlib.import_module(f"{package}.core.optimizer")
    returned = module.configure_optimizers()
    try:
        optimizers, schedulers, monitor = parse._configure_optimizers(returned or [])
        if module.automatic_optimization:
            configs = parse._configure_schedulers_automatic_opt(schedulers, monitor)
        else:
            configs = parse._configure_schedulers_manual_opt(schedulers)
        parse._validate_multiple_optimizers_support(optimizers, module)
        parse._validate_optimizers_attached(optimizers, configs)
    except Exception as error:  # Lightning's own has no base but Exception
        text = " ".join(str(error).split())
        raise ConfigError(f"{type(module).__name__}.configure_optimizers: {text}") from None
    if any(isinstance(config.scheduler, ReduceLROnPlateau) for config in configs):
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returns a ReduceLROnPlateau, whose "
            "rates would differ between sites; return a scheduler that counts steps"
        )
    return optimizers, configs


class Schedules:
    """A module's schedulers.

    Args:
        module: a LightningModule.
        configs: its schedulers, with intervals and frequencies.
    """

    def __init__(self, module: Any, configs: Sequence[Any]) -> None:
        self._module = module
        self._configs = configs
        self._start = [copy.deepcopy(config.scheduler.state_dict()) for config in configs]
        self._rates = [
            [group["lr"] for group in config.scheduler.optimizer.param_groups] for config in configs
        ]

    def follow(self, step: int, num_epoch_steps: int) -> None:
        """Set the rates of a step of the run.

        Args:
            step: counted from 0.
            num_epoch_steps: in an epoch, for schedulers whose interval it is.
        """
        for index, config in enumerate(self._configs):
            passed = step if config.interval == "step" else step // num_epoch_steps
            self.seek(index, passed // config.frequency)

    def count(self, index: int) -> int:
        """Steps that a scheduler has taken."""
        return int(self._configs[index].scheduler.last_epoch)

    def seek(self, index: int, count: int) -> None:
        """Bring a scheduler to where so many steps lead."""
        scheduler = self._configs[index].scheduler
        if self.count(index) > count:
            scheduler.load_state_dict(copy.deepcopy(self._start[index]))
            for group, rate in zip(
                scheduler.optimizer.param_groups, self._rates[index], strict=True
            ):
                group["lr"] = rate
        with warnings.catch_warnings():
            # It took these steps before its optimiser did, in this process.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*")
            while self.count(index) < count:
                self._module.lr_scheduler_step(scheduler, None)
