"""Memory that is lent again and again."""

from __future__ import annotations

import threading

import torch

from fedwan import buffers
from fedwan.buffers import lend
from fedwan.codecs import fp32
from fedwan.state import Layout, Role
from tests.support import spec

LAYOUT: Layout = {
    "g/n": spec((), Role.COUNTER, torch.int64),
    "g/weight": spec((5, 3), dtype=torch.bfloat16),
}


def test_what_is_lent_is_nobody_else_s_and_is_lent_again_when_the_last_part_is_gone() -> None:
    first, second = lend(LAYOUT), lend(LAYOUT)
    assert (first["g/weight"].shape, first["g/weight"].dtype) == ((5, 3), torch.float32)
    assert first["g/n"].dtype == torch.int64
    first["g/weight"].fill_(1.0)
    second["g/weight"].fill_(2.0)
    assert bool((first["g/weight"] == 1.0).all())
    address, row = first["g/n"].data_ptr(), first["g/weight"][2]
    first.clear()
    assert lend(LAYOUT)["g/n"].data_ptr() != address and row.tolist() == [1.0] * 3
    # A payload of exact values is of the very memory, and whoever reads it may be another thread.
    held = [fp32().encode({"g/weight": row}, {}, {"g/weight": spec((3,))})[0]]
    del row
    assert lend(LAYOUT)["g/n"].data_ptr() != address
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    third = lend(LAYOUT)
    assert third["g/n"].data_ptr() == address
    larger = lend({"g/weight": spec((500, 3))})
    assert larger["g/weight"].shape == (500, 3)


def test_no_more_is_kept_than_is_said_and_nothing_is_no_trouble() -> None:
    held = [lend(LAYOUT) for _ in range(buffers.KEPT + 3)]
    held.clear()
    assert len(buffers._free) == buffers.KEPT
    assert lend({}) == {}
    buffers.forget()
    assert not buffers._free


def test_a_large_block_is_not_held_for_little() -> None:
    large = lend({"g/weight": spec((500, 3))})
    address = large["g/weight"].data_ptr()
    large.clear()
    small = lend(LAYOUT)
    assert small["g/weight"].untyped_storage().nbytes() < 400
    assert lend({"g/weight": spec((400, 3))})["g/weight"].data_ptr() == address
