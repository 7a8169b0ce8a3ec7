from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disturbance import least_disturbed


def clock(*stolen: int) -> Callable[[], tuple[int, int]]:
    """Ticks of measures that take 100 each, so many of them stolen."""
    pairs = [pair for ticks in stolen for pair in ((0, 0), (ticks, 100))]
    return iter(pairs).__next__


def test_the_first_measure_of_a_quiet_machine_counts() -> None:
    values = iter("abc")
    assert least_disturbed(lambda: next(values), times=clock(9, 2, 0)) == "b"
    assert list(values) == ["c"]


def test_without_quiet_the_least_disturbed_counts_whatever_it_says() -> None:
    values = iter([3.0, 1.0, 2.0])
    assert least_disturbed(lambda: next(values), num=3, times=clock(9, 5, 7)) == 1.0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat")
def test_the_machine_tells_its_times() -> None:
    assert least_disturbed(lambda: 4, num=2) == 4
