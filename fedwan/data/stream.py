"""Batches without end: what every shard gives, and the stream of a shard that is held in memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fedwan.data.shuffle import Shuffle
from fedwan.workloads.base import Batch

__all__ = ["BatchStream", "Stream"]


class Stream(Protocol):
    """Shuffled batches of one shard, without end; see `fedwan.data.shuffle` for their order."""

    def next_batch(self) -> Batch:
        """The next samples, on the stream's device."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Where the stream stands: after the last batch that was taken from it."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from `state_dict()`.

        Raises:
            CheckpointError: the state is of a shard of another size.
        """
        ...

    def close(self) -> None:
        """Give back threads and memory; no batch can be taken afterwards."""
        ...


class BatchStream:
    """Shuffled batches of a shard in memory, without end.

    Args:
        data: the shard's samples and labels; at least one.
        batch_size: samples in every batch; at least one.
        generator: CPU generator of the permutations. Its state is part of `state_dict()`.
        device: where batches are wanted; the shard is moved there once.
    """

    def __init__(
        self,
        data: Batch,
        batch_size: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        assert len(data.x) == len(data.y)
        self._data = Batch(data.x.to(device), data.y.to(device))
        self._shuffle = Shuffle(len(data.y), batch_size, generator)

    def next_batch(self) -> Batch:
        """The next `batch_size` samples, on the stream's device."""
        index = self._shuffle.next_index().to(self._data.y.device)
        return Batch(self._data.x[index], self._data.y[index])

    def state_dict(self) -> dict[str, Tensor]:
        """Where the stream stands: `generator` (uint8), `order` (int64), `position` (int64, ())."""
        return self._shuffle.state()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `Stream`."""
        self._shuffle.load_state(state)

    def close(self) -> None:
        """Nothing to give back."""
