"""An endless order of samples that resumes in the middle of an epoch, bit for bit.

Each epoch is a fresh permutation; a batch that reaches the end of one goes on into the next. So no
sample is ever dropped, every batch is full, and a shard smaller than a batch works too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.errors import CheckpointError

__all__ = ["Shuffle"]


class Shuffle:
    """Which samples the next batch consists of.

    Args:
        num_samples: in the shard, at least 1.
        batch_size: samples in every batch, at least 1.
        generator: CPU generator of the permutations. Its state is part of `state()`.
    """

    def __init__(self, num_samples: int, batch_size: int, generator: torch.Generator) -> None:
        assert num_samples > 0 and batch_size > 0
        self.num_samples = num_samples
        self._batch_size = batch_size
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.int64)
        self._position = 0

    def next_index(self) -> Tensor:
        """Places of the next `batch_size` samples in the shard, (batch_size,), int64."""
        parts: list[Tensor] = []
        missing = self._batch_size
        while missing:
            if self._position == len(self._order):
                self._order = torch.randperm(self.num_samples, generator=self._generator)
                self._position = 0
            part = self._order[self._position : self._position + missing]
            self._position += len(part)
            missing -= len(part)
            parts.append(part)
        return torch.cat(parts)

    def state(self) -> dict[str, Tensor]:
        """Where it stands: `generator` (uint8), `order` (int64), `position` (int64, ()).

        `order` is never written into, so that it need not be copied.
        """
        return {
            "generator": self._generator.get_state(),
            "order": self._order,
            "position": torch.tensor(self._position),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from `state()`.

        Raises:
            CheckpointError: the state is of a shard of another size.
        """
        order, position = state["order"], int(state["position"])
        if len(order) not in (0, self.num_samples) or not 0 <= position <= len(order):
            raise CheckpointError(
                f"the data stream in the checkpoint stands at {position} of {len(order)} samples, "
                f"but this shard has {self.num_samples}; resume with the same data, split and seed"
            )
        self._generator.set_state(state["generator"])
        self._order = order.clone()
        self._position = position
