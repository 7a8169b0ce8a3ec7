"""An endless stream of shuffled batches that resumes in the middle of an epoch, bit for bit.

Each epoch is a fresh permutation; a batch that reaches the end of one goes on into the next. So no
sample is ever dropped, every batch is full, and a shard smaller than a batch works too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.errors import CheckpointError
from fedwan.workloads.base import Batch

__all__ = ["BatchStream"]


class BatchStream:
    """Shuffled batches of one shard, without end.

    Args:
        data: the shard's samples and labels; at least one.
        batch_size: samples in every batch; at least one.
        generator: CPU generator of the permutations. Its state is part of `state()`.
        device: where batches are wanted; the shard is moved there once.
    """

    def __init__(
        self,
        data: Batch,
        batch_size: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        assert len(data.x) == len(data.y) > 0 and batch_size > 0
        self._data = Batch(data.x.to(device), data.y.to(device))
        self._batch_size = batch_size
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.int64)
        self._position = 0

    def next_batch(self) -> Batch:
        """The next `batch_size` samples, on the stream's device."""
        parts: list[Tensor] = []
        missing = self._batch_size
        while missing:
            if self._position == len(self._order):
                self._order = torch.randperm(len(self._data.y), generator=self._generator)
                self._position = 0
            part = self._order[self._position : self._position + missing]
            self._position += len(part)
            missing -= len(part)
            parts.append(part)
        index = torch.cat(parts).to(self._data.y.device)
        return Batch(self._data.x[index], self._data.y[index])

    def state(self) -> dict[str, Tensor]:
        """Where the stream stands: `generator` (uint8), `order` (int64), `position` (int64, ())."""
        return {
            "generator": self._generator.get_state(),
            "order": self._order.clone(),
            "position": torch.tensor(self._position),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from `state()`.

        Raises:
            CheckpointError: the state is of a shard of another size.
        """
        order, position = state["order"], int(state["position"])
        if len(order) not in (0, len(self._data.y)) or not 0 <= position <= len(order):
            raise CheckpointError(
                f"the data stream in the checkpoint stands at {position} of {len(order)} samples, "
                f"but this shard has {len(self._data.y)}; resume with the same data, split and seed"
            )
        self._generator.set_state(state["generator"])
        self._order = order.clone()
        self._position = position
