"""Threads beside the step loop."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from fedwan.site.background import NICENESS, background_threads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_step_back_and_their_maker_does_not() -> None:
    mine = niceness()
    with background_threads(2, "beside") as pool:
        assert pool.submit(niceness).result() == min(19, mine + NICENESS)
    assert niceness() == mine
