"""What works beside the step loop: threads that let it go first, and memory that is used again.

On a GPU a thread of `background_threads(…, device)` has a queue of its own (a stream): its copies
do not wait for the training steps that are queued meanwhile. What it reads must have been queued
before (`queued_until_now`), and what it wrote is there once `await_queue` returns.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
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


def background_threads(
    num: int, name: str, device: torch.device | None = None
) -> ThreadPoolExecutor:
    """Threads of lower priority than their maker's, where threads have one of their own.

    Where processors are few, the step loop, and the GPU with it, would else wait for its turn.
    With a CUDA device each has a stream of its own there.
    """
    return ThreadPoolExecutor(num, name, _begin, (device,))


def _begin(device: torch.device | None) -> None:
    # On a CPU this thread computes alone. With a second team beside the step loop's, OpenMP has
    # more threads than processors, and GNU's puts them to sleep after every operation: steps of
    # small networks took twice as long (docs/log.md).
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # That is also what later threads begin with, unless another thread says otherwise.
    other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    other.start()
    other.join()
    if sys.platform == "linux":  # elsewhere it would be the whole process's
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + NICENESS)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def queued_until_now(device: torch.device) -> Callable[[], None]:
    """To be called by another thread: what that queues from then on comes after what is queued."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(event)


def await_queue(device: torch.device) -> None:
    """Wait until a GPU has done what this thread has queued; nothing is to be done on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
