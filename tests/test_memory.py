"""The allocator's settings, seen from a process that uses them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CODE = """
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
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")


def test_free_pages_inside_a_heap_are_given_back_now_and_then() -> None:
    argv = [sys.executable, "-c", CODE]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    held, did, left, early, again = told.split()
    assert float(held) > 80 and float(left) < 15
    assert (early, did, again) == ("False", "True", "False")
