"""Room for deltas is used again, and never by two."""

from __future__ import annotations

import torch

from fedwan.site.spare import ALIGNMENT, Room, Spares
from fedwan.state import Layout, Role, TensorSpec

LARGE: Layout = {
    "net/weight": TensorSpec((300, 7), torch.bfloat16, Role.PARAMETER),
    "net/count": TensorSpec((), torch.int64, Role.COUNTER),
    "net/bias": TensorSpec((5,), torch.float32, Role.PARAMETER),
}
SMALL: Layout = {"net/bias": TensorSpec((5,), torch.float32, Role.PARAMETER)}
BESIDE = {name: torch.zeros(spec.shape) for name, spec in LARGE.items()}


def block_of(room: Room) -> int:
    assert room.block is not None
    return room.block.data_ptr()


def test_rooms_have_the_shapes_and_parameters_are_fp32() -> None:
    room = Spares().lend(LARGE, BESIDE)
    assert {name: tuple(value.shape) for name, value in room.items()} == {
        name: spec.shape for name, spec in LARGE.items()
    }
    assert room["net/weight"].dtype is torch.float32
    assert room["net/count"].dtype is torch.int64
    assert all((value.data_ptr() - block_of(room)) % ALIGNMENT == 0 for value in room.values())


def test_tensors_of_a_room_do_not_overlap() -> None:
    room = Spares().lend(LARGE, BESIDE)
    for number, value in enumerate(room.values()):
        value.fill_(number)
    assert [float(value.float().mean()) for value in room.values()] == [0, 1, 2]


def test_what_was_given_back_is_lent_again_even_for_a_smaller_fragment() -> None:
    spares = Spares()
    first = spares.lend(LARGE, BESIDE)
    where = block_of(first)
    spares.take_back(first)
    assert not first
    assert block_of(spares.lend(SMALL, BESIDE)) == where


def test_two_rooms_at_once_share_nothing() -> None:
    spares = Spares()
    first = spares.lend(LARGE, BESIDE)
    assert block_of(spares.lend(LARGE, BESIDE)) != block_of(first)


def test_giving_back_twice_does_not_lend_twice() -> None:
    spares = Spares()
    first = spares.lend(LARGE, BESIDE)
    spares.take_back(first)
    spares.take_back(first)
    second = spares.lend(LARGE, BESIDE)
    assert block_of(spares.lend(LARGE, BESIDE)) != block_of(second)


def test_blocks_too_small_for_a_later_fragment_are_let_go() -> None:
    spares = Spares()
    small = spares.lend(SMALL, BESIDE)
    large = spares.lend(LARGE, BESIDE)
    where = block_of(large)
    spares.take_back(small)
    spares.take_back(large)
    assert block_of(spares.lend(SMALL, BESIDE)) == where
