"""Plain outer SGD: the update is -lr times the delta. With lr 1 this is federated averaging."""

from __future__ import annotations

from fedwan.outer.base import Transform
from fedwan.state import State

__all__ = ["sgd"]


def sgd(lr: float) -> Transform:
    """θ' = θ - lr Δ (McMahan et al. 2016, 1602.05629, for lr = 1)."""

    def init(params: State) -> State:
        return {}

    def update(delta: State, state: State, params: State | None = None) -> tuple[State, State]:
        return {name: value * -lr for name, value in delta.items()}, state

    return Transform(init, update)
