"""Threads that work beside the step loop, and let it go first.

Coding a fragment takes a processor for a second or so in every round. Where processors are few, the
step loop would otherwise wait for its turn among them each time that it wakes, and the GPU with it.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["beside_steps"]

NICENESS = 8
"""About a sixth of the step loop's share where both want the same processor."""


def beside_steps(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads of lower priority than their maker's, where threads have one of their own."""
    return ThreadPoolExecutor(num_threads, name, _step_back)


def _step_back() -> None:
    if sys.platform == "linux":  # elsewhere it would be the whole process's
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + NICENESS)
