"""Memory for the deltas of fragments in flight, used again and again.

Fresh memory of the host costs more than what is written to it: the kernel has to clear it first.
What lies on other devices is left to torch, which keeps what was freed there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from fedwan.state import Layout, Role, TensorSpec

__all__ = ["Room", "Spares"]

KEPT = 2
"""Blocks kept while nobody uses them: one delta is encoded while the next one is taken."""
ALIGNMENT = 64
"""Of each tensor's first byte: a cache line."""


class Room(dict[str, Tensor]):
    """Tensors by name, in memory that was lent."""

    block: Tensor | None = None


class Spares:
    """Lends memory for tensors; any thread may ask and give back.

    Memory: two blocks, and more while more rooms are lent, each as large as the largest room. One
    that is forgotten instead of given back is freed.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._size = 0
        self._lock = threading.Lock()

    def lend(self, layout: Layout, beside: Mapping[str, Tensor]) -> Room:
        """Room for a layout's tensors, fp32 for parameters, holding whatever it holds.

        Args:
            layout: names, shapes and dtypes.
            beside: tensors of these names, on whose devices the room is.
        """
        if any(beside[name].device.type != "cpu" for name in layout):
            return Room(
                (name, torch.empty(spec.shape, dtype=_dtype(spec), device=beside[name].device))
                for name, spec in layout.items()
            )
        room = Room()
        room.block = self._take(sum(map(_stride, layout.values())))
        start = 0
        for name, spec in layout.items():
            raw = room.block[start : start + spec.num_values * _dtype(spec).itemsize]
            room[name] = raw.view(_dtype(spec)).view(spec.shape)
            start += _stride(spec)
        return room

    def _take(self, size: int) -> Tensor:
        with self._lock:
            if size > self._size:
                self._size = size
                self._blocks.clear()
            elif self._blocks:
                return self._blocks.pop()
            return torch.empty(self._size, dtype=torch.uint8)

    def take_back(self, room: Room) -> None:
        """Nobody reads this room any more; it is emptied. A second time, it does nothing."""
        block, room.block = room.block, None
        room.clear()
        with self._lock:
            if block is not None and len(block) == self._size and len(self._blocks) < KEPT:
                self._blocks.append(block)


def _dtype(spec: TensorSpec) -> torch.dtype:
    return torch.float32 if spec.role is Role.PARAMETER else spec.dtype


def _stride(spec: TensorSpec) -> int:
    """Bytes from the beginning of a tensor to that of the next."""
    num_bytes = spec.num_values * _dtype(spec).itemsize
    return num_bytes + -num_bytes % ALIGNMENT
