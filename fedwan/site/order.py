"""That a script's optimisers step on the gradients that were exchanged, and on no others.

Where gradients travel the coordinator steps as well, or alone: a script that clips after
`site.reduce()`, or steps before it, would train another model than the run's and not know it.
What the coordinator clips is clipped here as well, by the same function, to the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fedwan.config import COMMAND, Config
from fedwan.errors import UserError
from fedwan.optim_state import NamedOptimizers
from fedwan.site.script import Script
from fedwan.state import network_of
from fedwan.strategy import Strategy
from fedwan.workloads.optim import clip, difference, rate_at, rounds_otherwise


class StepOrder:
    """Watches a script's optimisers by hooks; a `UserError` tells what is out of order.

    `held` are the optimisers with the networks' names. A step that is given a closure computes
    gradients inside of it, and is not looked at.
    """

    def __init__(
        self, script: Script, config: Config, held: NamedOptimizers, strategy: Strategy
    ) -> None:
        is_own, does_step = config.workload == COMMAND, strategy.contributes == "gradient"
        self._all_step = strategy.clock == "versions"
        """Whether the coordinator takes the same steps."""
        if is_own:
            _check_optimizers(script, config, held, does_step=does_step, all_step=self._all_step)
        self._optimizers = script.optimizers if is_own and does_step else {}
        self._inner, self._num_steps = config.inner, config.steps
        self._networks = {parameter: network_of(name) for name, parameter in held.params.items()}
        self._step = 0
        self._rates: dict[str, float] = {}
        """By network, where the coordinator takes the same steps."""
        self._marks: dict[Tensor, Any] = {}
        """Of each parameter, what changes once the gradient that was exchanged is written to."""
        self._stepped: list[torch.optim.Optimizer] = []
        watched = self._optimizers.values()
        self._hooks = [optimizer.register_step_pre_hook(self._look) for optimizer in watched]
        self._hooks += [optimizer.register_step_post_hook(self._look_back) for optimizer in watched]

    def note_exchanged(self, step: int) -> None:
        """Gradients of a step, counted from 0, have been exchanged: clipped, they stay."""
        if not self._hooks:
            return
        self._step = step
        for network, inner in self._inner.items() if self._all_step else ():
            self._rates[network] = rate_at(inner, step, self._num_steps)
            clip([p for p, own in self._networks.items() if own == network], inner.clip_norm)
        self._marks = {parameter: _mark(parameter) for parameter in self._networks}

    def end_step(self) -> None:
        """A step is complete."""
        if self._all_step and self._stepped:
            for name, optimizer in self._optimizers.items():
                if optimizer not in self._stepped:
                    self._refuse(f"optimizers[{name!r}] has not stepped after it")
        self._marks, self._stepped = {}, []

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._all_step and optimizer in self._stepped:
            self._refuse("an optimiser has stepped twice after it")
        self._stepped.append(optimizer)
        if not _has_closure(args, kwargs):
            self._check(optimizer)

    def _look_back(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):  # as Lightning gives: it has exchanged gradients inside
            self._check(optimizer)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._marks:
            self._refuse("an optimiser has stepped before it")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (network := self._networks.get(parameter)) is None:
                    self._refuse("an optimiser holds a parameter of no network")
                if self._marks[parameter] != _mark(parameter):
                    self._refuse(f"gradients of {network!r} have changed since")
                rate = self._rates.get(network)
                if rate is not None and not math.isclose(group["lr"], rate, rel_tol=1e-6):
                    self._refuse(f"the lr of {network!r} is {float(group['lr']):g}, not {rate:g}")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"this run's strategy exchanges gradients in site.reduce(), and at step {self._step} "
            f"{what}; call every backward(), then site.reduce() once, then each optimiser's step() "
            "once; leave clipping and schedules to the run (inner.NETWORK.clip_norm, .schedule), "
            "or choose a strategy that sends deltas, such as strategy=local_sgd h=1"
        )


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(map(callable, (*args[1:], *kwargs.values())))


def _mark(parameter: Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _check_optimizers(
    script: Script, config: Config, held: NamedOptimizers, *, does_step: bool, all_step: bool
) -> None:
    """Refuse those of a script whose steps or moments others take to be what settings say.

    `does_step`: the coordinator steps as well; `all_step`: and to the same bits.
    """
    for network, inner in config.inner.items():
        for name in held.of_network(network):
            optimizer = script.optimizers[name]
            text = difference(inner, optimizer, is_stepped=does_step)
            text = text or (rounds_otherwise(optimizer) if all_step else "")
            if text and (does_step or inner.state == "average"):
                what = "the coordinator steps as well" if does_step else "sites' moments merge"
                raise UserError(
                    f"optimizers[{name!r}] is not the one that {what}: {text}; make them agree "
                    f"(inner.{network}.*), or take another strategy, as strategy=local_sgd h=1"
                )
    # A loss scale is undone in place without a trace, or within the step.
    for name, part in script.state.items() if does_step else ():
        if isinstance(part, LRScheduler) or getattr(part, "is_enabled", bool)():
            raise UserError(
                f"state[{name!r}] is a {type(part).__name__}, which the coordinator, that "
                f"steps as well, knows nothing of; take it out, or strategy=local_sgd h=1"
            )
