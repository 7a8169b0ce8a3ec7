"""That a script's optimisers step on the gradients that were exchanged, and on no others.

Where gradients travel the coordinator steps as well, or alone: a script that clips after
`site.reduce()`, or steps before it, would train another model than the run's and not know it.
What the coordinator clips is clipped here as well, by the same function, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.errors import UserError
from fedwan.state import network_of
from fedwan.workloads.optim import clip, rate_at

_MEND = "or choose a strategy that sends deltas, such as strategy=local_sgd h=1"


class StepOrder:
    """Watches a script's optimisers by hooks; a `UserError` tells what is out of order.

    A step that is given a closure computes gradients inside of it, and is not looked at.
    """

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        parameters: Mapping[str, Tensor],
        inner: Mapping[str, InnerConfig],
        num_steps: int,
        *,
        all_step: bool,
    ) -> None:
        self._optimizers, self._parameters, self._inner = optimizers, parameters, inner
        self._num_steps, self._all_step = num_steps, all_step
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._names = {
            id(optimizer): [
                names[id(p)] for group in optimizer.param_groups for p in group["params"]
            ]
            for optimizer in optimizers.values()
        }
        self._step = 0
        self._marks: dict[str, tuple[int, int]] | None = None
        """Of each gradient that was exchanged, what changes once it is written to."""
        self._stepped: list[torch.optim.Optimizer] = []
        self._hooks = [o.register_step_pre_hook(self._look) for o in optimizers.values()]

    def note_exchanged(self, step: int) -> None:
        """Gradients of a step, counted from 0, have been exchanged: clipped, they stay."""
        if not self._hooks:
            return
        self._step = step
        for network, inner in self._inner.items() if self._all_step else ():
            own = [p for name, p in self._parameters.items() if network_of(name) == network]
            clip(own, inner.clip_norm)
        self._marks = self._present()

    def end_step(self) -> None:
        """A step is complete."""
        left_out = [n for n, o in self._optimizers.items() if o not in self._stepped]
        if self._all_step and self._stepped and left_out:
            raise UserError(
                f"optimizers[{left_out[0]!r}] has not stepped after site.reduce(), and the "
                f"coordinator steps all of them; have it step each time, {_MEND}"
            )
        self._marks, self._stepped = None, []

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def _present(self) -> dict[str, tuple[int, int]]:
        grads = ((name, param.grad) for name, param in self._parameters.items())
        return {name: (id(grad), grad._version) for name, grad in grads if grad is not None}

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(map(callable, (*args[1:], *kwargs.values()))):
            self._stepped.append(optimizer)
            return
        if self._marks is None:
            raise UserError(
                "an optimiser has stepped before site.reduce(), and this run's strategy exchanges "
                "gradients; call every backward(), then site.reduce() once, then let the "
                f"optimisers step, {_MEND}"
            )
        if self._all_step and optimizer in self._stepped:
            raise UserError(
                f"an optimiser has stepped twice after one site.reduce(), and the coordinator "
                f"steps once; {_MEND[3:]}"
            )
        self._stepped.append(optimizer)
        if self._all_step:
            self._check_rate(optimizer)
        present = self._present()
        for name in self._names[id(optimizer)]:
            if self._marks.get(name) != present.get(name):
                network = network_of(name)
                raise UserError(
                    f"gradients of {network!r} have changed since site.reduce(), as by clipping or "
                    "another backward(), and the coordinator steps on those that were exchanged; "
                    "call every backward() before, leave clipping to site.reduce() by the run's "
                    f"inner.{network}.clip_norm=1.0, {_MEND}"
                )

    def _check_rate(self, optimizer: torch.optim.Optimizer) -> None:
        for network in {network_of(name) for name in self._names[id(optimizer)]}:
            rate = rate_at(self._inner[network], self._step, self._num_steps)
            for group in optimizer.param_groups:
                lr = float(group["lr"])
                if not math.isclose(lr, rate, rel_tol=1e-6):
                    raise UserError(
                        f"the lr of {network!r} is {lr:g} at step {self._step}, and "
                        f"the coordinator, that steps as well, has {rate:g}; leave schedulers "
                        f"out, or set the same by inner.{network}.schedule, {_MEND}"
                    )
