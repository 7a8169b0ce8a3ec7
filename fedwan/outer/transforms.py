"""Outer optimisers: what becomes of the merged delta (global - local) of each tensor.

They are (init, update) pairs, in the manner of optax. `state = init(param)`;
`update, state = update(delta, state)`; the new parameter is `param + update`. State is a flat dict
of tensors by field. Both inputs may be written to, and had better be: fresh memory costs more than
what is computed, since the kernel has to clear it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.state import State, add_prefix, select_prefix


class Transform(NamedTuple):
    """An outer optimiser, or one link in a chain of them."""

    init: Callable[[Tensor], State]
    """(a global parameter) -> its first state."""
    update: Callable[[Tensor, State], tuple[Tensor, State]]
    """(its merged delta, its state) -> (what is to be added to it, its next state); in place if
    you like."""


def apart(value: Tensor, *states: State) -> Tensor:
    """The tensor, or a copy if it shares memory with a state: who takes it may write to it."""
    kept = {each.untyped_storage().data_ptr() for state in states for each in state.values()}
    return value.clone() if value.untyped_storage().data_ptr() in kept else value


def chain(*transforms: Transform) -> Transform:
    """Apply transforms in order, each to what the one before it returned.

    The last of them decides the sign: `sgd` and `nesterov` turn a delta (global - local) into an
    update to be added.
    """

    def init(param: Tensor) -> State:
        state: State = {}
        for index, transform in enumerate(transforms):
            state |= add_prefix(str(index), transform.init(param))
        return state

    def update(delta: Tensor, state: State) -> tuple[Tensor, State]:
        new_state: State = {}
        for index, transform in enumerate(transforms):
            own = select_prefix(str(index), state)
            moved, part = transform.update(delta, dict(own))
            delta = apart(moved, own, part)  # the next one writes to it
            new_state |= add_prefix(str(index), part)
        return delta, new_state

    return Transform(init, update)


def sgd(lr: float) -> Transform:
    """θ' = θ - lr Δ; lr 1 is federated averaging (McMahan et al. 2016, 1602.05629)."""
    return Transform(lambda param: {}, lambda delta, state: (delta.mul_(-lr), state))


def nesterov(lr: float, momentum: float) -> Transform:
    """SGD with Nesterov momentum, DiLoCo's (2311.08105, algorithm 1), in [0, 1).

        b' = momentum b + Δ        θ' = θ - lr (Δ + momentum b')

    Agrees with `torch.optim.SGD(lr, momentum, nesterov=True)` stepped on Δ as the gradient: b
    starts at zero, so the first step has b' = Δ, as torch's has. Keeps one copy of the parameters.
    """

    def update(delta: Tensor, state: State) -> tuple[Tensor, State]:
        buffer = state["momentum"]
        torch.add(delta, buffer, alpha=momentum, out=buffer)
        return delta.add_(buffer, alpha=momentum).mul_(-lr), state

    return Transform(lambda param: {"momentum": torch.zeros_like(param)}, update)


def delayed_nesterov(lr: float, momentum: float, every: int) -> Transform:
    """For updates that come one by one (Liu et al. 2024, 2401.09135, algorithm 3 with c = 0).

    Momentum that is added at every arrival acts many times on stale directions. So a delta moves
    the weights at once, the momentum only every N arrivals, `every`, the number of sites:

        θ' = θ - lr g / N        at every N-th  m' = momentum m + Σ g / N,  θ' -= lr momentum m'

    Where N deltas of the same weights come one after the other, the sum of their updates is that of
    `nesterov` for their mean. Keeps two copies of the parameters: m and Σ g.
    """

    def init(param: Tensor) -> State:
        momenta, sums = torch.zeros_like(param), torch.zeros_like(param)
        return {"momentum": momenta, "sum": sums, "count": torch.zeros((), dtype=torch.int64)}

    def update(delta: Tensor, state: State) -> tuple[Tensor, State]:
        buffer, total, count = state["momentum"], state["sum"].add_(delta), state["count"].add_(1)
        delta.mul_(-lr / every)
        if int(count) >= every:  # more were awaited when some of these came
            torch.add(total.div_(every), buffer, alpha=momentum, out=buffer)
            delta.add_(buffer, alpha=-lr * momentum)
            total.zero_(), count.zero_()
        return delta, state

    return Transform(init, update)
