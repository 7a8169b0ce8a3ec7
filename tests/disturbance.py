"""Measures of the machine are taken while the hypervisor leaves it to itself, if that can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["least_disturbed"]

T = TypeVar("T")

QUIET = 0.02
"""Share of the processors' time that others took, up to which a measure says what it should."""


def least_disturbed(
    measure: Callable[[], T], num: int = 8, times: Callable[[], tuple[int, int]] | None = None
) -> T:
    """What `measure` gives the first time that the machine is its own, or as nearly so as it gets.

    Chosen by the time that was stolen meanwhile (proc(5), `/proc/stat`), never by what comes out.

    Args:
        measure: takes some tenths of a second at least; the clock counts hundredths.
        num: of times, if the machine is never quiet.
        times: ticks that were stolen, and all; for tests.
    """
    times = times or _ticks
    results: list[tuple[float, T]] = []
    while len(results) < num:
        stolen, total = times()
        value = measure()
        stolen_then, total_then = times()
        share = (stolen_then - stolen) / max(1, total_then - total)
        if share <= QUIET:
            return value
        results.append((share, value))
    return min(results, key=lambda pair: pair[0])[1]


def _ticks() -> tuple[int, int]:
    row = Path("/proc/stat").read_text().split("\n", 1)[0]
    numbers = [int(word) for word in row.split()[1:9]]
    return numbers[7], sum(numbers)
