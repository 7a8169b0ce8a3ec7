"""The allocator's settings, seen from a process that uses them, and what memory is free."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedwan import memory

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_free_pages_inside_a_heap_are_given_back_now_and_then() -> None:
    argv = [sys.executable, "-c", CODE]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    held, did, left, early, again = told.split()
    assert float(held) > 80 and float(left) < 15
    assert (early, did, again) == ("False", "True", "False")


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "of_files"),
    [
        ("0::/run/me", "run", "memory.max", "memory.current", "active_file 2\ninactive_file 3"),
        ("0::/of/the/host", "", "memory.max", "memory.current", "active_file 4\ninactive_file 1"),
        (
            "4:memory:/me",
            "memory/me",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "active_file 0\ninactive_file 0\ntotal_active_file 5\ntotal_inactive_file 0",
        ),
    ],
)
def test_memory_is_what_a_cgroup_has_left_with_the_pages_of_files(
    line: str,
    folder: str,
    limit: str,
    used: str,
    of_files: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text(f"1:cpu:/x\n{line}\n")
    (root / folder).mkdir(parents=True)
    (root / folder / limit).write_text("100\n")
    (root / folder / used).write_text("70\n")
    (root / folder / "memory.stat").write_text(f"anon 65\n{of_files}\n")
    monkeypatch.setattr(memory, "OWN_CGROUPS", own)
    monkeypatch.setattr(memory, "CGROUPS", root)
    assert memory.available_bytes() == 100 - 70 + 5
    (root / folder / limit).write_text("max\n")
    assert 1e6 < memory.available_bytes() <= psutil.virtual_memory().total


def test_where_no_cgroup_says_so_memory_is_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "OWN_CGROUPS", ROOT / "no such file")
    assert 1e6 < memory.available_bytes() <= psutil.virtual_memory().total
