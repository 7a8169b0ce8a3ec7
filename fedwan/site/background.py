"""What works beside the step loop: threads that let it go first.

On a GPU a thread of `background_threads(…, device)` has a queue of its own (a stream): its copies
do not wait for the training steps that are queued meanwhile. What it reads must have been queued
before (`queued_until_now`), and what it wrote is there once `await_queue` returns.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

NICENESS = 8
"""About a sixth of the step loop's share where both want the same processor."""


def background_threads(
    num: int, name: str, device: torch.device | None = None
) -> ThreadPoolExecutor:
    """Threads of lower priority than their maker's, where threads have one of their own.

    Where processors are few, the step loop, and the GPU with it, would else wait for its turn.
    With a CUDA device each has a stream of its own there.
    """
    return ThreadPoolExecutor(num, name, _begin, (device,))


def _begin(device: torch.device | None) -> None:
    # On a CPU this thread computes alone. With a second team beside the step loop's, OpenMP has
    # more threads than processors, and GNU's puts them to sleep after every operation: steps of
    # small networks took twice as long (docs/log.md).
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # That is also what later threads begin with, unless another thread says otherwise.
    other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    other.start()
    other.join()
    if sys.platform == "linux":  # elsewhere it would be the whole process's
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + NICENESS)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def queued_until_now(device: torch.device) -> Callable[[], None]:
    """To be called by another thread: what that queues from then on comes after what is queued."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(event)


def await_queue(device: torch.device) -> None:
    """Wait until a GPU has done what this thread has queued; nothing is to be done on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
