"""The order of samples; tests of `BatchStream` say what batches are made of it."""

from __future__ import annotations

import torch

from fedwan.data.shuffle import Shuffle


def test_a_state_does_not_follow_the_order_that_it_was_taken_of() -> None:
    shuffle = Shuffle(10, 4, torch.Generator().manual_seed(0))
    shuffle.next_index()
    state = shuffle.state()
    before = {name: value.clone() for name, value in state.items()}
    for _ in range(5):
        shuffle.next_index()
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_a_state_that_was_loaded_does_not_follow_either() -> None:
    shuffle, other = (Shuffle(10, 4, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    shuffle.next_index()
    other.load_state(shuffle.state())
    expected = [shuffle.next_index().tolist() for _ in range(6)]
    assert [other.next_index().tolist() for _ in range(6)] == expected
