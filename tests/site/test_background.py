"""Memory that is lent again and again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from fedwan.site.background import BufferPool, background_threads
from fedwan.state import Layout, Role
from tests.support import spec

LAYOUT: Layout = {
    "g/n": spec((), Role.COUNTER, torch.int64),
    "g/weight": spec((5, 3), dtype=torch.bfloat16),
}


def test_what_was_given_back_is_lent_again_and_what_is_lent_is_nobody_else_s() -> None:
    pool = BufferPool()
    first, second = pool.lend(LAYOUT), pool.lend(LAYOUT)
    assert (first["g/weight"].shape, first["g/weight"].dtype) == ((5, 3), torch.float32)
    assert first["g/n"].dtype == torch.int64
    first["g/weight"].fill_(1.0)
    second["g/weight"].fill_(2.0)
    assert bool((first["g/weight"] == 1.0).all())
    address = first["g/n"].data_ptr()
    pool.take_back(first)
    assert not first and pool.lend(LAYOUT)["g/n"].data_ptr() == address
    pool.take_back(second)
    larger = pool.lend({"g/weight": spec((500, 3))})
    assert larger["g/weight"].shape == (500, 3)


def test_memory_that_is_not_the_host_s_is_left_to_torch() -> None:
    pool = BufferPool()
    held = {"g/weight": torch.empty(5, 3, device="meta")}
    pool.take_back(held)
    assert not held and pool.lend(LAYOUT)["g/weight"].is_cpu


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
