"""The stream of batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.data.stream import BatchStream
from fedwan.errors import CheckpointError
from fedwan.workloads.base import Batch


def stream(num: int, batch_size: int, seed: int = 0) -> BatchStream:
    x = torch.arange(num, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    return BatchStream(Batch(x, x.long()), batch_size, generator)


def take(source: BatchStream, num: int) -> torch.Tensor:
    return torch.stack([source.next_batch().y for _ in range(num)])


@given(num=st.integers(1, 40), batch_size=st.integers(1, 50), epochs=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_no_sample_is_dropped_and_every_batch_is_full(
    num: int, batch_size: int, epochs: int
) -> None:
    source = stream(num, batch_size)
    seen = take(source, -(-num * epochs // batch_size))
    assert seen.shape[1] == batch_size
    for epoch in seen.flatten()[: num * epochs].view(epochs, num):
        assert torch.equal(epoch.sort().values, torch.arange(num))


@given(num=st.integers(1, 40), batch_size=st.integers(1, 50), before=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_it_resumes_in_the_middle_of_an_epoch_bit_for_bit(
    num: int, batch_size: int, before: int
) -> None:
    source = stream(num, batch_size)
    take(source, before) if before else None
    state = source.state()
    rest = take(source, 7)
    resumed = stream(num, batch_size, seed=99)
    resumed.load_state(state)
    assert torch.equal(take(resumed, 7), rest)


def test_the_state_is_made_of_tensors_and_does_not_follow_the_stream() -> None:
    source = stream(10, 4)
    take(source, 1)
    state = source.state()
    before = {name: value.clone() for name, value in state.items()}
    take(source, 5)
    assert set(state) == {"generator", "order", "position"}
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_epochs_are_shuffled_anew() -> None:
    first, second = take(stream(32, 32), 2)
    assert not torch.equal(first, second)


def test_samples_and_labels_stay_together() -> None:
    batch = stream(10, 7).next_batch()
    assert torch.equal(batch.x.long(), batch.y)


def test_the_state_of_another_shard_is_refused() -> None:
    source = stream(10, 4)
    take(source, 1)
    with pytest.raises(CheckpointError, match="stands at 4 of 10 samples, but this shard has 11"):
        stream(11, 4).load_state(source.state())
