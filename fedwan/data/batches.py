"""Batches: any pytree of tensors, such as a `Batch`; captions in one are a list of text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset

from fedwan.workloads.base import Batch

__all__ = ["InMemory", "first_leaf", "num_samples_in", "tell", "to_device"]


class InMemory(Dataset[Any]):
    """A data set whose samples are the rows of tensors: a pytree of at least one."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return num_samples_in(self.batch)

    def __getitem__(self, place: int) -> Any:
        return tree_map_only(Tensor, lambda leaf: leaf[place], self.batch)

    def take(self, places: Tensor) -> Any:
        """The rows at some places, (n,) int64, as a batch."""
        places = places.to(first_leaf(self.batch).device)
        return tree_map_only(Tensor, lambda leaf: leaf[places], self.batch)


def first_leaf(batch: Any) -> Tensor:
    """A batch's first tensor, which tells how many samples there are."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            return leaf
    raise TypeError(f"a batch needs a tensor, which this {type(batch).__name__} has not")


def num_samples_in(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor."""
    return len(first_leaf(batch))


def to_device(batch: Any, device: torch.device | str) -> Any:
    """A batch with its tensors on a device."""
    return tree_map_only(Tensor, lambda leaf: leaf.to(device), batch)


def tell(batch: Any, number: int | None) -> Any:
    """A batch with the labels that networks are told: a site's number, or None for classes.

    A GAN whose sites hold different data fails, as each site's discriminator knows the others' for
    generated at sight. Told whose sample it looks at, it has nothing to disagree about: there is
    one distribution to learn for each site, and together they are the mixture of all sites, each
    counting alike. It needs no labels.
    """
    if number is None:
        return batch
    if isinstance(batch, Batch):
        return Batch(batch.x, torch.full_like(batch.y, number))
    return {**batch, "y": torch.full_like(batch["y"], number)}
