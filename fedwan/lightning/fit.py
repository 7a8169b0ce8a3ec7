"""Takes a LightningModule's steps, in automatic or manual optimisation, at a site.

A step of the run is `site.accumulate` calls of `training_step`, each on its part of the batch, in
which every optimiser of the module has stepped: a module that trains its networks in turn, batch by
batch, makes one step in as many calls as it has turns. Where gradients overflow in fp16, the
optimiser that they are of does not step, and the calls are repeated at half the loss scale.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedwan.config import Config
from fedwan.errors import UserError
from fedwan.lightning.finding import is_overridden, lightning_of
from fedwan.lightning.networks import split_module
from fedwan.lightning.schedules import Schedules, configure
from fedwan.lightning.trainer import StandIn
from fedwan.workloads.base import Batch, Reduce, keep_local
from fedwan.workloads.descent import autocast
from fedwan.workloads.loss_scale import LossScale
from fedwan.workloads.optim import clip

__all__ = ["Fit"]

Outcome = Tensor | Mapping[str, Any] | None
"""What `training_step` and `validation_step` return."""


class Fit:
    """A LightningModule in training.

    Args:
        module: on its device.
        config: resolved.

    Attributes:
        networks: see `fedwan.lightning.networks`.
        optimizers: of those that are trained.
        kept: the loss scale, and how far the module has taken its own schedulers.
    """

    def __init__(self, module: Any, config: Config) -> None:
        package = lightning_of(type(module))
        self.module = module
        self._config = config
        self._trainer = StandIn(config, package, self)
        self._trainer.lightning_module = module
        module.trainer = self._trainer
        module.log = self._log
        optimizers, schedulers = configure(module, package)
        self.networks, self.optimizers = split_module(module, optimizers)
        self._names = {id(optimizer): name for name, optimizer in self.optimizers.items()}
        self._schedules = Schedules(module, schedulers)
        wrap = importlib.import_module(f"{package}.core.optimizer").LightningOptimizer
        self._trainer.optimizers = optimizers
        self._trainer.lr_scheduler_configs = schedulers
        self._trainer._lightning_optimizers = [
            wrap._to_lightning_optimizer(optimizer, self._trainer) for optimizer in optimizers
        ]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        self._scale = LossScale() if config.site.precision == "16-mixed" else None
        self.kept = dict(self._scale.state) if self._scale else {}
        self._counts = {f"scheduler{index}": index for index in range(len(schedulers))}
        if not module.automatic_optimization:
            self.kept |= {name: torch.tensor(0) for name in self._counts}
        self._reduce: Reduce = keep_local
        self._stepped: set[str] = set()
        self._unscaled: dict[str, bool] = {}
        self._has_begun = False
        self._epoch = -1

    # A step --------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """See `fedwan.workloads.base.Following`."""
        self._trainer.step = step

    def step(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """One completed step of every optimiser.

        Args:
            batch: whose size `site.accumulate` divides.
            reduce: called for the networks of an optimiser before it steps.

        Returns:
            What the module logged, and what it returned as its loss.

        Raises:
            UserError: the module took no step with an optimiser.
        """
        self._reduce = reduce
        self._follow()
        num_parts = self._config.site.accumulate
        parts = [Batch(*chunk) for chunk in zip(*(t.chunk(num_parts) for t in batch), strict=True)]
        while True:
            self._stepped.clear()
            self._unscaled.clear()
            for index, part in enumerate(parts):
                self._train(part, index, is_last=index == num_parts - 1)
            is_finite = all(self._unscaled.values())
            if self._scale is not None:
                self._scale.update(is_finite)
            if is_finite:
                break
        self._require_all_stepped()
        for name, index in self._counts.items() if not self._is_automatic else ():
            self.kept[name].fill_(self._schedules.count(index))
        self._trainer.step += 1
        return {name: value.detach() for name, value in self._trainer.callback_metrics.items()}

    @property
    def _is_automatic(self) -> bool:
        return bool(self.module.automatic_optimization)

    def _follow(self) -> None:
        """Schedules and hooks of where the run stands."""
        trainer, module = self._trainer, self.module
        if self._is_automatic:
            self._schedules.follow(trainer.step, trainer.num_epoch_steps if self._counts else 1)
        else:
            for name, index in self._counts.items():
                self._schedules.seek(index, int(self.kept[name]))
        if not self._has_begun:
            self._has_begun = True
            module.on_fit_start()
            module.on_train_start()
        if trainer.current_epoch != self._epoch:
            if self._epoch >= 0:
                module.on_train_epoch_end()
            self._epoch = trainer.current_epoch
            module.on_train_epoch_start()

    def _train(self, part: Batch, index: int, is_last: bool) -> None:
        module = self.module
        batch_index = self._trainer.batch_index(index)
        module.on_train_batch_start(part, batch_index)
        # Not cached: weights may change within, and be used without a gradient before with one.
        with autocast(self._config.site.precision, part.x.device, cache_enabled=False):
            outcome: Outcome = _call(module.training_step, part, batch_index)
        loss = _loss(outcome)
        if loss is not None:
            self._trainer.callback_metrics["loss"] = loss.detach()
        if self._is_automatic:
            self._descend(loss, index, batch_index, is_last)
        module.on_train_batch_end(outcome, part, batch_index)

    def _descend(self, loss: Tensor | None, index: int, batch_index: int, is_last: bool) -> None:
        """What follows `training_step` in automatic optimisation."""
        if loss is None:
            raise UserError(
                f"{type(self.module).__name__}.training_step returned no loss, so that there is no "
                "step to count; return one for every batch"
            )
        module, (optimizer,) = self.module, self._trainer._lightning_optimizers
        epoch = self._trainer.current_epoch
        if index == 0:
            module.on_before_zero_grad(optimizer.optimizer)
            module.optimizer_zero_grad(epoch, batch_index, optimizer.optimizer)
        self.backward(loss / self._config.site.accumulate)
        if is_last:
            module.optimizer_step(epoch, batch_index, optimizer, lambda: loss)

    def _require_all_stepped(self) -> None:
        idle = [name for name in self.optimizers if name not in self._stepped]
        if idle:
            calls = self._config.site.accumulate
            raise UserError(
                f"{type(self.module).__name__}.training_step was called {calls} times and the "
                f"optimiser of {idle[0]!r} took no step; set site.accumulate to the number of "
                "batches in which every optimiser steps, so that all of it counts as one step"
            )

    # What the module calls -----------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """See `Engine`."""
        if self._scale is not None:
            loss = loss.float() * self._scale.factor
        self.module.on_before_backward(loss)
        self.module.backward(loss, *args, **kwargs)
        self.module.on_after_backward()

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """See `Engine`: the closure, and a step unless gradients overflowed."""
        returned = closure()
        if self.unscale(optimizer):
            optimizer.step(**kwargs)
        return returned

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Engine`."""
        name = self._names[id(optimizer)]
        if self._scale is None:
            return True
        if name not in self._unscaled:
            params = _params(optimizer)
            self._unscaled[name] = self._scale.unscale(
                [p.grad for p in params if p.grad is not None]
            )
        return self._unscaled[name]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self.unscale(optimizer):
            raise UserError(
                "gradients overflowed in fp16 before an optimiser that the module steps itself; "
                "take optimisers from self.optimizers(), or set site.precision=bf16-mixed"
            )
        name = self._names[id(optimizer)]
        clip(_params(optimizer), self._config.inner[name].clip_norm)
        self._reduce([name])
        self.module.on_before_optimizer_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        name = self._names[id(optimizer)]
        self._stepped.add(name)
        self._unscaled.pop(name, None)  # its next gradients are scaled anew

    def _log(self, name: str, value: Any, *_: object, **__: object) -> None:
        """`self.log`: the last value of each name, where it is a number."""
        if isinstance(value, int | float):
            value = torch.tensor(float(value))
        if isinstance(value, Tensor) and value.numel() == 1:
            self._trainer.callback_metrics[name] = value.detach().float().reshape(())

    # What a site asks ----------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, real: Batch) -> dict[str, float]:
        """What `validation_step` logs and returns (as `loss`) for held-out data; {} without one."""
        if not is_overridden(type(self.module), "validation_step"):
            return {}
        trainer = self._trainer
        known, trainer.callback_metrics = trainer.callback_metrics, {}
        try:
            loss = _loss(_call(self.module.validation_step, real, 0))
            found = {} if loss is None else {"loss": float(loss)}
            return {name: float(value) for name, value in trainer.callback_metrics.items()} | found
        finally:
            trainer.callback_metrics = known


def _call(function: Callable[..., Outcome], batch: Batch, index: int) -> Outcome:
    """Steps may leave out the batch's index."""
    return (
        function(batch, index)
        if len(inspect.signature(function).parameters) > 1
        else function(batch)
    )


def _loss(outcome: Outcome) -> Tensor | None:
    if isinstance(outcome, Mapping):
        outcome = outcome.get("loss")
    return outcome


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
