"""What a LightningModule sees as `self.trainer`, where a site trains it.

It has what modules read most: where the run stands, optimisers and schedules, a logger that keeps
nothing, and the parts of a strategy and a precision plugin that modules reach through their own
methods (`optimizers`, `manual_backward`, `clip_gradients`, `toggle_optimizer`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fedwan.config import Config
from fedwan.data import FILE_NAMES, find_source, has_own_data
from fedwan.data.files import open_files
from fedwan.errors import UserError

__all__ = ["Engine", "StandIn"]


class Engine(Protocol):
    """What takes a module's steps; see `fedwan.lightning.fit`."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a part of a step."""
        ...

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """A step of one optimiser."""
        ...

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """See to it that an optimiser's gradients are not scaled; whether they are finite."""
        ...


class _Missing(UserError, AttributeError):
    """A module asks for a part of a trainer that a site does not have."""


class StandIn:
    """A trainer, as far as modules look at theirs; also its strategy and its precision plugin.

    Args:
        config: resolved.
        package: of Lightning, see `lightning_of`.
        engine: takes the steps.
    """

    barebones = False
    training = True
    validating = testing = predicting = sanity_checking = False
    is_global_zero = True
    global_rank = local_rank = node_rank = 0
    world_size = num_devices = num_nodes = 1
    gradient_clip_val = gradient_clip_algorithm = None
    progress_bar_callback = None
    datamodule = None

    def __init__(self, config: Config, package: str, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._num_epoch_steps = 0
        self.step = 0
        """Of the run, the present one, counted from 0."""
        self.precision = config.site.precision
        self.max_steps = self.estimated_stepping_batches = config.steps
        self.accumulate_grad_batches = config.site.accumulate
        self.logger = importlib.import_module(f"{package}.loggers.logger").DummyLogger()
        self.loggers = [self.logger]
        self.callback_metrics: dict[str, Tensor] = {}
        """What the module has logged, by name, the last value of each."""
        self.logged_metrics = self.progress_bar_metrics = self.callback_metrics
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self.lr_scheduler_configs: Sequence[Any] = ()
        self.lightning_module: Any = None
        self._lightning_optimizers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Missing(
            f"the LightningModule reads trainer.{name}, which a site has none of; "
            "leave it out where the module is trained by fedwan"
        )

    # Where the run stands ------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Steps of all optimisers so far."""
        return self.step * max(1, len(self.optimizers))

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch: as many as the mean site has of its shard."""
        return self.num_epoch_steps * self.accumulate_grad_batches

    @property
    def num_epoch_steps(self) -> int:
        """Steps in which the mean site sees its shard once."""
        if not self._num_epoch_steps:
            data = self._config.data
            if data.name in FILE_NAMES:
                num_samples: float = int((~open_files(data).is_held_out).sum())
            else:
                num_samples = len(find_source(data.name).load()[0].y)
            num_samples /= 1 if has_own_data(data) else self._config.sites
            self._num_epoch_steps = max(1, math.ceil(num_samples / data.batch))
        return self._num_epoch_steps

    @property
    def current_epoch(self) -> int:
        """Counted from 0."""
        return self.step // self.num_epoch_steps

    @property
    def max_epochs(self) -> int:
        """Of the run."""
        return math.ceil(self.max_steps / self.num_epoch_steps)

    def batch_index(self, part: int) -> int:
        """Of a part of the present step, in its epoch."""
        return self.step % self.num_epoch_steps * self.accumulate_grad_batches + part

    # What a strategy and a precision plugin do for a module --------------------------------

    @property
    def strategy(self) -> StandIn:
        """Its part is taken here, too."""
        return self

    @property
    def precision_plugin(self) -> StandIn:
        """Its part is taken here, too."""
        return self

    def backward(self, loss: Tensor, optimizer: object, *args: Any, **kwargs: Any) -> None:
        """Of `manual_backward`."""
        self._engine.backward(loss, *args, **kwargs)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Of a LightningOptimizer."""
        return self._engine.step_optimizer(optimizer, closure, **kwargs)

    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, clip_val: float, algorithm: str
    ) -> None:
        """Of the module's own `clip_gradients`."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        self._engine.unscale(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if clip_val > 0 and algorithm == "value":
            torch.nn.utils.clip_grad_value_(params, clip_val)
        elif clip_val > 0:
            torch.nn.utils.clip_grad_norm_(params, clip_val)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Of one process."""
        return tensor
