"""Outer optimisers: what becomes of the merged delta (global - local).

`sgd` with lr 1 is federated averaging. `nesterov` is DiLoCo's (2311.08105, algorithm 1).
`delayed_nesterov` is for updates that come one by one (Liu et al. 2024, 2401.09135, algorithm 3,
with c = 0): momentum that is added at every arrival acts many times on stale directions, so that a
delta moves the weights at once, the momentum only every N arrivals, N the number of sites.
`clip_by_norm` stands before them in a chain.
"""

from __future__ import annotations

import torch

from fedwan.outer.base import Transform
from fedwan.state import State, add_prefix, select_prefix

_MOMENTUM, _SUM, _COUNT = "momentum", "sum", "count"


def sgd(lr: float) -> Transform:
    """θ' = θ - lr Δ (McMahan et al. 2016, 1602.05629, for lr = 1)."""

    def init(params: State) -> State:
        return {}

    def update(delta: State, state: State, params: State | None = None) -> tuple[State, State]:
        return {name: value * -lr for name, value in delta.items()}, state

    return Transform(init, update)


def nesterov(lr: float, momentum: float) -> Transform:
    """SGD with Nesterov momentum: b' = momentum b + Δ; θ' = θ - lr (Δ + momentum b').

    Agrees with `torch.optim.SGD(lr, momentum, nesterov=True)` stepped on Δ as the gradient: b
    starts at zero, so the first step has b' = Δ, as torch's has. Keeps one copy of the parameters.

    Args:
        lr: outer learning rate, above 0.
        momentum: in [0, 1).
    """

    def init(params: State) -> State:
        return add_prefix(_MOMENTUM, {n: torch.zeros_like(p) for n, p in params.items()})

    def update(delta: State, state: State, params: State | None = None) -> tuple[State, State]:
        old = select_prefix(_MOMENTUM, state)
        new: State = {}
        out: State = {}
        for name, value in delta.items():
            buffer = torch.add(value, old[name], alpha=momentum)
            out[name] = torch.add(value, buffer, alpha=momentum).mul_(-lr)
            new[name] = buffer
        return out, add_prefix(_MOMENTUM, new)

    return Transform(init, update)


def delayed_nesterov(lr: float, momentum: float, every: int) -> Transform:
    """θ' = θ - lr g / N; at every N-th arrival m' = momentum m + Σ g / N, and θ' -= lr momentum m'.

    Where N deltas of the same weights come one after the other, the sum of their updates is that of
    `nesterov` for their mean. Keeps two copies of the parameters: m and Σ g.

    Args:
        lr: outer learning rate, above 0.
        momentum: in [0, 1).
        every: N, at least 1.
    """

    def init(params: State) -> State:
        zeros = {name: torch.zeros_like(value) for name, value in params.items()}
        counts = {name: torch.zeros((), dtype=torch.int64) for name in params}
        return (
            add_prefix(_MOMENTUM, zeros)
            | add_prefix(_SUM, {name: value.clone() for name, value in zeros.items()})
            | add_prefix(_COUNT, counts)
        )

    def update(delta: State, state: State, params: State | None = None) -> tuple[State, State]:
        momenta, sums = select_prefix(_MOMENTUM, state), select_prefix(_SUM, state)
        counts = select_prefix(_COUNT, state)
        out: State = {}
        for name, value in delta.items():
            sums[name] = sums[name] + value
            counts[name] = counts[name] + 1
            out[name] = value * (-lr / every)
            if int(counts[name]) == every:
                momenta[name] = torch.add(sums[name] / every, momenta[name], alpha=momentum)
                out[name].add_(momenta[name], alpha=-lr * momentum)
                sums[name] = torch.zeros_like(value)
                counts[name] = torch.zeros_like(counts[name])
        new = add_prefix(_MOMENTUM, momenta) | add_prefix(_SUM, sums) | add_prefix(_COUNT, counts)
        return out, new

    return Transform(init, update)


def clip_by_norm(max_norm: float) -> Transform:
    """Δ' = Δ min(1, max_norm / |Δ|), |Δ| over all tensors together (Pascanu et al., 1211.5063)."""

    def init(params: State) -> State:
        return {}

    def update(delta: State, state: State, params: State | None = None) -> tuple[State, State]:
        if not delta:
            return {}, state
        norm = torch.stack([value.norm() for value in delta.values()]).norm()
        factor = (max_norm / norm.clamp_min(1e-30)).clamp_max(1.0)
        return {name: value * factor for name, value in delta.items()}, state

    return Transform(init, update, per_tensor=False)
