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
from fedwan.workloads.base import Batch

__all__ = ["LABELS", "num_labels", "tell", "tell_labels"]

LABELS = ("class", "site")
"""Forms of `data.labels`."""


def num_labels(config: Config) -> int:
    """Labels that networks are told are 0 … num_labels - 1."""
    if config.data.labels == "site":
        return config.sites
    return source_of(config.data).num_classes


def tell(batch: Batch, number: int | None) -> Batch:
    """A batch with the labels that networks are told: a site's number, or None for classes."""
    return batch if number is None else Batch(batch.x, tell_labels(batch.y, number))


def tell_labels(classes: Tensor, number: int | None) -> Tensor:
    """As many labels: a site's number, or None for the classes themselves."""
    return classes if number is None else torch.full_like(classes, number)
