"""Host memory for tensors that is used again, of the process as a whole.

Fresh memory costs more than what is computed in it: the kernel has to clear each page first, on a
virtual machine at 0.5 to 6 GB/s. A block comes back by itself when the last tensor in it is gone,
whoever holds that: an update on its way, what error feedback owes, a checkpoint being written.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from fedwan.state import Layout, Role, State

ALIGNMENT = 64
"""Of each tensor's first byte: a cache line."""
KEPT = 2
"""Blocks kept while nobody uses them: one delta is encoded while the next one is taken."""

_free: deque[Tensor] = deque(maxlen=KEPT)


def lend(layout: Layout) -> State:
    """Tensors of these shapes, parameters in fp32, in one block; they hold whatever they hold."""
    places, end, dtypes = {}, 0, {}
    for name, spec in layout.items():
        start = end + -end % ALIGNMENT
        dtypes[name] = torch.float32 if spec.role is Role.PARAMETER else spec.dtype
        end = start + spec.num_values * dtypes[name].itemsize
        places[name] = slice(start, end)
    block = _take(end)
    # An array for each time: torch holds it as long as a tensor has its memory.
    array = block.numpy()
    weakref.finalize(array, _free.append, block).atexit = False
    lent = torch.from_numpy(array)
    return {
        name: lent[places[name]].view(dtypes[name]).view(spec.shape)
        for name, spec in layout.items()
    }


def forget() -> None:
    """Give what nobody uses back to the kernel: this run lends no more."""
    _free.clear()


def _take(num_bytes: int) -> Tensor:
    """A free block of about this size, or a new one: a large one is not held for little."""
    for _ in range(KEPT):
        with suppress(IndexError):
            block = _free.pop()
            if num_bytes <= len(block) <= 2 * num_bytes:
                return block
            _free.appendleft(block)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
