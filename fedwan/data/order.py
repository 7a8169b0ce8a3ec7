"""An endless order of samples that resumes in the middle of an epoch, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.errors import CheckpointError
from fedwan.rng import derive_seed

__all__ = ["Draw", "Order"]


class Draw(NamedTuple):
    """Which samples a batch consists of."""

    places: Tensor
    """(batch,), int64."""
    seed: int
    """Of what the data set draws while it makes them."""


class Order:
    """An endless order of samples: each epoch is a fresh permutation.

    A batch that reaches the end of one goes on into the next: no sample is ever dropped, and every
    batch is full.

    Args:
        num_samples: at least 1.
        batch_size: samples in every batch, at least 1.
        generator: CPU generator of the permutations.
    """

    def __init__(self, num_samples: int, batch_size: int, generator: torch.Generator) -> None:
        assert num_samples > 0 and batch_size > 0
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.int64)
        self._position = 0
        self._drawn = 0
        self._states: deque[dict[str, Tensor]] = deque()

    def __iter__(self) -> Iterator[Draw]:
        while True:
            draw = self.draw()
            self._states.append(self.state_dict())
            yield draw

    def draw(self) -> Draw:
        """The next batch's samples."""
        parts: list[Tensor] = []
        missing = self._batch_size
        while missing:
            if self._position == len(self._order):
                self._order = torch.randperm(self._num_samples, generator=self._generator)
                self._position = 0
            part = self._order[self._position : self._position + missing]
            self._position += len(part)
            missing -= len(part)
            parts.append(part)
        self._drawn += 1
        return Draw(torch.cat(parts), derive_seed(self._generator.initial_seed(), self._drawn))

    def taken(self) -> dict[str, Tensor]:
        """The state after the earliest batch that was drawn in iteration and not yet taken."""
        return self._states.popleft()

    def state_dict(self) -> dict[str, Tensor]:
        """`generator` (uint8), `order` (int64, never written into), `position`, `taken` (int64)."""
        return {
            "generator": self._generator.get_state(),
            "order": self._order,
            "position": torch.tensor(self._position),
            "taken": torch.tensor(self._drawn),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from `state_dict()`.

        Raises:
            CheckpointError: the state is of a shard of another size.
        """
        order, position = state.get("order", torch.empty(0)), int(state.get("position", -1))
        if len(order) not in (0, self._num_samples) or not 0 <= position <= len(order):
            raise CheckpointError(
                f"the data stream in the checkpoint stands at {position} of {len(order)} samples, "
                f"but this shard has {self._num_samples}; resume with the same data, split and seed"
            )
        self._states.clear()
        self._generator.set_state(state["generator"])
        self._order, self._position = order.clone(), position
        self._drawn = int(state["taken"])
