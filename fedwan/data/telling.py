"""What networks that are told a label are told of a sample: its class, or whose it is.

A GAN whose sites hold different data fails, as each site's discriminator knows the others' for
generated at sight. Told whose sample it looks at, it has nothing to disagree about: there is one
distribution to learn for each site, by networks that share all but an embedding, and together
they are the mixture of all sites, each counting alike. It needs no labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.config import Config
from fedwan.data.sources import source_of
from fedwan.data.stream import Stream
from fedwan.workloads.base import Batch

__all__ = ["LABELS", "TellingStream", "num_labels", "tell"]

LABELS = ("class", "site")
"""Forms of `data.labels`."""


def num_labels(config: Config) -> int:
    """Labels that networks are told are 0 … num_labels - 1."""
    if config.data.labels == "site":
        return config.sites
    return source_of(config.data).num_classes


def tell(batch: Batch, number: int | None) -> Batch:
    """A batch with the labels that networks are told: a site's number, or None for classes."""
    if number is None:
        return batch
    return Batch(batch.x, torch.full_like(batch.y, number))


class TellingStream:
    """A site's stream, told whose it is; see `fedwan.data.stream.Stream`.

    Args:
        stream: of samples and their classes.
        number: the site's, 0 … sites - 1.
    """

    def __init__(self, stream: Stream, number: int) -> None:
        self._stream = stream
        self._number = number

    def next_batch(self) -> Batch:
        """See `Stream`."""
        return tell(self._stream.next_batch(), self._number)

    def state(self) -> dict[str, Tensor]:
        """See `Stream`."""
        return self._stream.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See `Stream`."""
        self._stream.load_state(state)

    def close(self) -> None:
        """See `Stream`."""
        self._stream.close()
