"""Threads beside the step loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from fedwan.site.background import background_threads


def test_only_the_threads_themselves_compute_alone() -> None:
    kept = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with background_threads(2, "test") as threads, ThreadPoolExecutor(1) as later:
            assert threads.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == 3
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(kept)
