"""What works beside the step loop: threads that let it go first, and memory that is used again."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedwan.state import Layout, Role, State

NICENESS = 8
"""About a sixth of the step loop's share where both want the same processor."""
ALIGNMENT = 64
"""Of each tensor's first byte: a cache line."""
KEPT = 2
"""Blocks kept while nobody uses them: one delta is encoded while the next one is taken."""


class BufferPool:
    """Lends host memory for tensors again and again; any thread may give back.

    Fresh memory costs more than what is written to it: the kernel has to clear it first.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def lend(self, layout: Layout) -> State:
        """Tensors of these shapes, parameters in fp32; they hold whatever they hold."""
        ends, end, dtypes = {}, 0, {}
        for name, spec in layout.items():
            start = end + -end % ALIGNMENT
            dtypes[name] = torch.float32 if spec.role is Role.PARAMETER else spec.dtype
            ends[name] = start, (end := start + spec.num_values * dtypes[name].itemsize)
        block = self._blocks.pop() if self._blocks else torch.empty(0, dtype=torch.uint8)
        if len(block) < end:
            block = torch.empty(end, dtype=torch.uint8)
        return {
            name: block[slice(*ends[name])].view(dtypes[name]).view(spec.shape)
            for name, spec in layout.items()
        }

    def take_back(self, buffers: State) -> None:
        """Nobody reads these any more; they are emptied. A GPU's memory is torch's to keep."""
        first = next(iter(buffers.values()), None)
        if first is not None and first.is_cpu and len(self._blocks) < KEPT:
            block = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
            self._blocks.append(block)
        buffers.clear()


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
