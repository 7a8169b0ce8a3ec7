"""The C allocator's settings for processes that move large tensors all day, and what is free.

glibc raises the size from which it maps blocks on their own up to 32 MB as blocks of that size are
freed. Tensors then share heaps with the chunks of transfers, the heaps fragment, and the process
keeps growing: measured on the coordinator, 200 MB model, 2 sites: from 1.2 to 1.9 GB in 10 rounds.
A fixed threshold keeps tensors out of the heaps, and huge pages make fresh mappings cheap to touch.
Heaps' free pages glibc gives back at a heap's end alone: 1.1 GB with 64 sites; `Tidier` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MMAP_BYTES = 3 << 20
TRIM_BYTES = 8 << 20
NUM_ARENAS = 2
TIDY_S = 0.5
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIMITS = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""By the controllers of a line of OWN_CGROUPS: folder, and files of limit and use."""


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


def available_bytes() -> float:
    """Memory that this process may still take: of the machine, or of a cgroup that it is in.

    Pages of files count as free, since the kernel drops them.
    """
    least: float = psutil.virtual_memory().available
    with contextlib.suppress(OSError):  # another kernel's
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in LIMITS:
                root, limit, used = LIMITS[controllers]
                inner = CGROUPS / root / path.lstrip("/")
                for folder in (inner, *inner.parents):  # a container may see its own as the root
                    least = min(least, _left(folder, limit, used))
    return least


def _left(folder: Path, limit: str, used: str) -> float:
    """Of a cgroup's limit; infinite where there is none."""
    try:
        words = (folder / "memory.stat").read_text().split()
        stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        kept = [stat.get(f"total_{of}", stat[of]) for of in ("active_file", "inactive_file")]
        most = int((folder / limit).read_text()) - int((folder / used).read_text())
    except (OSError, ValueError, KeyError):  # no such folder, or "max"
        return math.inf
    return most + sum(kept)


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
