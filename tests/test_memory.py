"""The allocator's settings, seen from a process that uses them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHURN = """
import sys
from fedwan.memory import tune_allocator
if sys.argv[1] == "tuned":
    tune_allocator()
import numpy
def rss_mb():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 / 2**20
for size in (8, 16, 31):  # freed blocks raise glibc's threshold to their size
    block = numpy.ones(size << 20, numpy.uint8)
    del block
before = rss_mb()
kept = []
for _ in range(8):
    block = numpy.ones(16 << 20, numpy.uint8)
    kept.append(bytes(200_000))  # lies above the block, if both come from one heap
    del block
    kept.append(b"x" * (9 << 20))
print(rss_mb() - before - sum(map(len, kept)) / 2**20)
"""


def churn(how: str) -> float:
    """MB that a process has grown by once it freed all large blocks."""
    out = subprocess.run(
        [sys.executable, "-c", CHURN, how], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return float(out.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's allocator")
def test_freed_tensors_leave_the_process() -> None:
    assert churn("tuned") < 8


HOLES = """
from fedwan.memory import Tidier, tune_allocator
tune_allocator()
def rss_mb():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 / 2**20
now = 0.0
tidier = Tidier(lambda: now)
before = rss_mb()
chunks = [bytes([i % 251]) * 1_000_000 for i in range(100)]
pins = []
for i in range(100):
    pins.append(bytes(20_000))  # somewhere among the chunks, so that the heap cannot shrink
last = chunks.pop()
del chunks
early = tidier.tidy()
held = rss_mb() - before
now = 1.0
print(held, tidier.tidy(), rss_mb() - before, early, tidier.tidy())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's allocator")
def test_free_pages_inside_a_heap_are_given_back_now_and_then() -> None:
    out = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, cwd=ROOT
    )
    held, did, left, early, again = out.stdout.split()
    assert float(held) > 80 and float(left) < 15
    assert (early, did, again) == ("False", "True", "False")
