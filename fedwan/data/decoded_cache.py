"""Decoded samples kept in memory, up to a limit.

All samples are of one size, and every epoch takes each of them once, in a new order. So the last
one used is no likelier to be used next than any other, and what is dropped for a newcomer is lost
for nothing: the first samples of the shard are kept, as many as fit, for good. Of c kept among n a
share of c / n is found, where dropping the least recently used finds less (docs/log.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DecodedCache"]


class DecodedCache:
    """The first samples of a shard, once they have been decoded; for several threads at once.

    Memory is taken as it fills.

    Args:
        num_samples: of the shard.
        shape: of one sample, of bytes.
        limit_bytes: most that samples may take together.
    """

    def __init__(self, num_samples: int, shape: tuple[int, ...], limit_bytes: int) -> None:
        sample_bytes = torch.Size(shape).numel()
        self.num_slots = min(num_samples, limit_bytes // sample_bytes)
        self.num_bytes = self.num_slots * sample_bytes
        self._samples = torch.empty(self.num_slots, *shape, dtype=torch.uint8)
        self._is_there = bytearray(self.num_slots)

    def get(self, place: int) -> Tensor | None:
        """The sample at a place of the shard, not to be written into; None if it is not kept."""
        if place < self.num_slots and self._is_there[place]:
            return self._samples[place]
        return None

    def put(self, place: int, sample: Tensor) -> None:
        """Keep a sample, if it is one of those that are kept."""
        if place < self.num_slots:
            self._samples.numpy()[place] = sample.numpy()
            self._is_there[place] = 1  # last, so that no other thread finds half of it
