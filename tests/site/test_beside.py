"""Threads beside the step loop are of lower priority, and leave the step loop's alone."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from fedwan.site.beside import NICENESS, beside_steps


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_they_step_back_and_their_maker_does_not() -> None:
    mine = niceness()
    with beside_steps(2, "beside") as pool:
        assert pool.submit(niceness).result() == min(19, mine + NICENESS)
    assert niceness() == mine


def test_an_error_reaches_who_asks() -> None:
    with beside_steps(1, "beside") as pool, pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result()
