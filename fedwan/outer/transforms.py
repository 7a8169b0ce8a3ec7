"""Outer optimisers: what becomes of the merged delta (global - local).

They are (init, update) pairs, in the manner of optax. `state = init(params)`;
`update, state = update(delta, state)`; the new global state is `params + update`. Inputs are never
mutated. State is a flat dict of tensors, named `field:tensor name`, so that a checkpoint is one
safetensors file. A tensor's state and update depend on that tensor alone: the engine passes one at
a time, so that temporaries are as large as a tensor, not as the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fedwan.state import State, add_prefix, select_prefix

_MOMENTUM, _SUM, _COUNT = "momentum", "sum", "count"


class Transform(NamedTuple):
    """An outer optimiser, or one link in a chain of them."""

    init: Callable[[State], State]
    """(global parameters) -> the first state."""
    update: Callable[[State, State], tuple[State, State]]
    """(merged delta, state) -> (what is to be added to the parameters, the next state)."""


def chain(*transforms: Transform) -> Transform:
    """Apply transforms in order, each to what the one before it returned.

    The last of them decides the sign: `sgd` and `nesterov` turn a delta (global - local) into an
    update to be added.
    """

    def init(params: State) -> State:
        state: State = {}
        for index, transform in enumerate(transforms):
            state |= add_prefix(str(index), transform.init(params))
        return state

    def update(delta: State, state: State) -> tuple[State, State]:
        new_state: State = {}
        for index, transform in enumerate(transforms):
            delta, part = transform.update(delta, select_prefix(str(index), state))
            new_state |= add_prefix(str(index), part)
        return delta, new_state

    return Transform(init, update)


def sgd(lr: float) -> Transform:
    """θ' = θ - lr Δ; lr 1 is federated averaging (McMahan et al. 2016, 1602.05629)."""

    def update(delta: State, state: State) -> tuple[State, State]:
        return {name: value * -lr for name, value in delta.items()}, state

    return Transform(lambda params: {}, update)


def nesterov(lr: float, momentum: float) -> Transform:
    """SGD with Nesterov momentum, DiLoCo's (2311.08105, algorithm 1), in [0, 1).

        b' = momentum b + Δ        θ' = θ - lr (Δ + momentum b')

    Agrees with `torch.optim.SGD(lr, momentum, nesterov=True)` stepped on Δ as the gradient: b
    starts at zero, so the first step has b' = Δ, as torch's has. Keeps one copy of the parameters.
    """

    def init(params: State) -> State:
        return add_prefix(_MOMENTUM, {n: torch.zeros_like(p) for n, p in params.items()})

    def update(delta: State, state: State) -> tuple[State, State]:
        old = select_prefix(_MOMENTUM, state)
        new: State = {}
        out: State = {}
        for name, value in delta.items():
            new[name] = torch.add(value, old[name], alpha=momentum)
            out[name] = torch.add(value, new[name], alpha=momentum).mul_(-lr)
        return out, add_prefix(_MOMENTUM, new)

    return Transform(init, update)


def delayed_nesterov(lr: float, momentum: float, every: int) -> Transform:
    """For updates that come one by one (Liu et al. 2024, 2401.09135, algorithm 3 with c = 0).

    Momentum that is added at every arrival acts many times on stale directions. So a delta moves
    the weights at once, the momentum only every N arrivals, `every`, the number of sites:

        θ' = θ - lr g / N        at every N-th  m' = momentum m + Σ g / N,  θ' -= lr momentum m'

    Where N deltas of the same weights come one after the other, the sum of their updates is that of
    `nesterov` for their mean. Keeps two copies of the parameters: m and Σ g.
    """

    def init(params: State) -> State:
        zeros, sums = ({n: torch.zeros_like(p) for n, p in params.items()} for _ in range(2))
        counts = {name: torch.zeros((), dtype=torch.int64) for name in params}
        return joined(zeros, sums, counts)

    def joined(momenta: State, sums: State, counts: State) -> State:
        return add_prefix(_MOMENTUM, momenta) | add_prefix(_SUM, sums) | add_prefix(_COUNT, counts)

    def update(delta: State, state: State) -> tuple[State, State]:
        momenta, sums = select_prefix(_MOMENTUM, state), select_prefix(_SUM, state)
        counts = select_prefix(_COUNT, state)
        out: State = {}
        for name, value in delta.items():
            sums[name] = sums[name] + value
            counts[name] = counts[name] + 1
            out[name] = value * (-lr / every)
            if int(counts[name]) >= every:  # more were awaited when some of these came
                momenta[name] = torch.add(sums[name] / every, momenta[name], alpha=momentum)
                out[name].add_(momenta[name], alpha=-lr * momentum)
                sums[name] = torch.zeros_like(value)
                counts[name] = torch.zeros_like(counts[name])
        return out, joined(momenta, sums, counts)

    return Transform(init, update)
