"""What works beside the step loop: its threads step back, and its memory is used again."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from fedwan.site.background import ALIGNMENT, NICENESS, BufferPool, background_threads
from fedwan.state import State

LARGE = {
    "weight": ((300, 7), torch.bfloat16),
    "count": ((), torch.int64),
    "bias": ((5,), torch.float32),
}
SMALL = {"bias": ((5,), torch.float32)}


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_step_back_and_their_maker_does_not() -> None:
    mine = niceness()
    with background_threads(2, "beside") as pool:
        assert pool.submit(niceness).result() == min(19, mine + NICENESS)
    assert niceness() == mine


def block_of(buffers: State) -> int:
    return next(iter(buffers.values())).untyped_storage().data_ptr()


def test_tensors_have_the_shapes_and_do_not_overlap() -> None:
    buffers = BufferPool().lend(LARGE)
    assert {n: (tuple(v.shape), v.dtype) for n, v in buffers.items()} == LARGE
    assert all((v.data_ptr() - block_of(buffers)) % ALIGNMENT == 0 for v in buffers.values())
    for number, value in enumerate(buffers.values()):
        value.fill_(number)
    assert [float(value.float().mean()) for value in buffers.values()] == [0, 1, 2]


def test_what_was_given_back_is_lent_again_and_never_twice() -> None:
    pool = BufferPool()
    first, other = pool.lend(LARGE), pool.lend(LARGE)
    where = block_of(first)
    assert block_of(other) != where
    pool.take_back(first)
    pool.take_back(first)
    assert not first
    again = pool.lend(SMALL)
    assert block_of(again) == where
    assert block_of(pool.lend(SMALL)) != where


def test_blocks_too_small_for_a_later_fragment_are_let_go() -> None:
    pool = BufferPool()
    small, large = pool.lend(SMALL), pool.lend(LARGE)
    where = block_of(large)
    pool.take_back(small)
    pool.take_back(large)
    assert block_of(pool.lend(SMALL)) == where
