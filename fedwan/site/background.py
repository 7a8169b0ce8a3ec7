"""Threads that work beside the step loop, and let it go first."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 8
"""About a sixth of the step loop's share where both want the same processor."""


def background_threads(num: int, name: str) -> ThreadPoolExecutor:
    """Threads of lower priority than their maker's, where threads have one of their own.

    Where processors are few, the step loop, and the GPU with it, would else wait for its turn.
    """
    return ThreadPoolExecutor(num, name, _lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere it would be the whole process's
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + NICENESS)
