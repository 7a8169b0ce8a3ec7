"""Outer SGD with Nesterov momentum, DiLoCo's outer optimiser (2311.08105, algorithm 1)."""

from __future__ import annotations

import torch

from fedwan.outer.base import Transform
from fedwan.state import State, add_prefix, select_prefix

__all__ = ["nesterov"]

_FIELD = "momentum"


def nesterov(lr: float, momentum: float) -> Transform:
    """SGD with Nesterov momentum: b' = momentum b + Δ; θ' = θ - lr (Δ + momentum b').

    Agrees with `torch.optim.SGD(lr, momentum, nesterov=True)` stepped on Δ as the gradient: b
    starts at zero, so the first step has b' = Δ, as torch's has. Keeps one copy of the parameters.

    Args:
        lr: outer learning rate, above 0.
        momentum: in [0, 1).
    """

    def init(params: State) -> State:
        return add_prefix(_FIELD, {n: torch.zeros_like(p) for n, p in params.items()})

    def update(delta: State, state: State, params: State | None = None) -> tuple[State, State]:
        old = select_prefix(_FIELD, state)
        new: State = {}
        out: State = {}
        for name, value in delta.items():
            buffer = torch.add(value, old[name], alpha=momentum)
            out[name] = torch.add(value, buffer, alpha=momentum).mul_(-lr)
            new[name] = buffer
        return out, add_prefix(_FIELD, new)

    return Transform(init, update)
