"""Clip the merged delta by its global norm before the outer optimiser sees it."""

from __future__ import annotations

import torch

from fedwan.outer.base import Transform
from fedwan.state import State

__all__ = ["clip_by_norm"]


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
