"""Nesterov momentum for updates that come one by one: applied once in a while, to their mean.

Liu et al. 2024 (2401.09135), algorithm 3, with c = 0. Momentum that is added at every arrival acts
many times on stale directions; here a delta moves the weights at once, the momentum only every
N arrivals, N the number of sites.
"""

from __future__ import annotations

import torch

from fedwan.outer.base import Transform
from fedwan.state import State, add_prefix, select_prefix

__all__ = ["delayed_nesterov"]

_MOMENTUM, _SUM, _COUNT = "momentum", "sum", "count"


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
