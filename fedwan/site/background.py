"""What works beside the step loop: threads that let it go first, and memory that is used again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedwan.state import State

NICENESS = 8
"""About a sixth of the step loop's share where both want the same processor."""
KEPT = 2
"""Blocks kept while nobody uses them: one delta is encoded while the next one is taken."""
ALIGNMENT = 64
"""Of each tensor's first byte: a cache line."""


def background_threads(num: int, name: str) -> ThreadPoolExecutor:
    """Threads of lower priority than their maker's, where threads have one of their own.

    Where processors are few, the step loop, and the GPU with it, would else wait for its turn.
    """
    return ThreadPoolExecutor(num, name, _lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere it would be the whole process's
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + NICENESS)


class BufferPool:
    """Lends host memory for tensors again and again; any thread may ask and give back.

    Fresh memory costs more than what is written to it: the kernel has to clear it first. Memory:
    two blocks, and more while more are lent, each as large as the largest.
    """

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self._blocks: list[Tensor] = []
        self._size = 0
        self._lock = threading.Lock()

    def lend(self, likes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> State:
        """Tensors of these shapes and dtypes, holding whatever they hold."""
        ends, end = {}, 0
        for name, (shape, dtype) in likes.items():
            start = end + -end % ALIGNMENT
            ends[name] = start, (end := start + torch.Size(shape).numel() * dtype.itemsize)
        block = self._take(end)
        return {
            name: block[slice(*ends[name])].view(dtype).view(shape)
            for name, (shape, dtype) in likes.items()
        }

    def copy(self, state: Mapping[str, Tensor]) -> State:
        """The state as it stands."""
        buffers = self.lend({name: (tuple(v.shape), v.dtype) for name, v in state.items()})
        for name, value in state.items():
            buffers[name].copy_(value.detach())
        return buffers

    def _take(self, size: int) -> Tensor:
        with self._lock:
            if size > self._size:
                self._size = size
                self._blocks.clear()
            elif self._blocks:
                return self._blocks.pop()
            return torch.empty(self._size, dtype=torch.uint8, pin_memory=self._is_pinned)

    def take_back(self, buffers: State) -> None:
        """Nobody reads these any more; they are emptied. A second time, it does nothing."""
        first = next(iter(buffers.values()), None)
        buffers.clear()
        if first is not None and first.device.type == "cpu":
            block = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
            with self._lock:
                if len(block) == self._size and len(self._blocks) < KEPT:
                    self._blocks.append(block)
