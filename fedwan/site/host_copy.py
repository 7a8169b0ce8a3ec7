"""Copies of a state in host memory, into the same memory every time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedwan.state import State

__all__ = ["HostCopy"]


class HostCopy:
    """Host memory that a state is copied to again and again.

    Fresh memory costs several times what the copy does, so that it is kept between two copies:
    as many bytes as the state has, pinned for what lies on a GPU.
    """

    def __init__(self) -> None:
        self._kept: State = {}

    def take(self, state: Mapping[str, Tensor]) -> State:
        """The state as it stands; valid until the next call, which writes over it."""
        self._kept = {name: self._room(name, value) for name, value in state.items()}
        for name, value in state.items():
            self._kept[name].copy_(value.detach())
        return dict(self._kept)

    def _room(self, name: str, value: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            return kept
        return torch.empty_like(
            value.detach(), device="cpu", requires_grad=False, pin_memory=value.is_cuda
        )
