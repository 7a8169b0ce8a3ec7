"""Settings of the C allocator for processes that move large tensors all day.

glibc raises the size from which it maps blocks on their own up to 32 MB as blocks of that size are
freed. Tensors then share heaps with the chunks of transfers, the heaps fragment, and the process
keeps growing: measured on the coordinator, 200 MB model, 2 sites: from 1.2 to 1.9 GB in 10 rounds.
A fixed threshold keeps tensors out of the heaps, and huge pages make fresh mappings cheap to touch.
Heaps' free pages glibc gives back at a heap's end alone: 1.1 GB with 64 sites; `Tidier` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MMAP_BYTES = 3 << 20
TRIM_BYTES = 8 << 20
NUM_ARENAS = 2
TIDY_S = 0.5


def _glibc(function: str) -> Any:
    """A function of glibc's; None where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(None), function)


def tune_allocator() -> None:
    """Fix the allocator's thresholds for this process; without effect where there is no glibc.

    To be called before torch allocates, since torch looks only once whether to ask for huge pages.
    """
    # Not a setting of ours: torch knows no other way to be told.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(M_ARENA_MAX, NUM_ARENAS)


class Tidier:
    """Gives the free pages of the heaps back; without effect where there is no glibc."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + TIDY_S
        self._trim = _glibc("malloc_trim")

    def tidy(self) -> bool:
        """Do so, unless it was done lately; whether it did. Costs about 5 ms for 1 GB of heap."""
        if self._trim is None or self._clock() < self._next:
            return False
        self._trim(0)
        self._next = self._clock() + TIDY_S
        return True
