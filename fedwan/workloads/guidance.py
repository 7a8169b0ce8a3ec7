"""Classifier-free guidance (Ho & Salimans 2022): samples that follow their labels more closely.

One network learns the velocity with labels and, where they were dropped, without:

    v = v_null + guidance * (v_label - v_null)

Without a label means a null class, one above the last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["balanced_labels", "drop_labels", "guide"]


def drop_labels(labels: Tensor, share: float, null: int, generator: torch.Generator) -> Tensor:
    """Labels, (batch,) int64, of which about a share is replaced by the null class.

    Args:
        labels: 0 … null - 1; not changed.
        share: chance of each label to be dropped, 0 to 1.
        null: the null class.
        generator: on the CPU.
    """
    dropped = torch.rand(len(labels), generator=generator) < share
    return labels.masked_fill(dropped.to(labels.device), null)


def balanced_labels(num: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """Labels to sample, (num,) int64: each class once, in random order, then each once again.

    So any part that is a multiple of `num_classes` long, counted from the start, is balanced.
    """
    turns = range(-(-num // num_classes))
    order = [torch.randperm(num_classes, generator=generator) for _ in turns]
    return torch.cat(order)[:num] if order else torch.empty(0, dtype=torch.int64)


def guide(
    velocity: Callable[[Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    null: int,
    guidance: float,
) -> Callable[[Tensor, Tensor], Tensor]:
    """The velocity that leads to samples of these labels.

    Args:
        velocity: (x (batch, …), sigma (batch,), labels (batch,)) -> d x / d sigma.
        labels: of the samples to come, (batch,) int64.
        null: the null class.
        guidance: 1 takes the labels' own velocity, 0 that of the null class; every other value
            takes both, at twice the cost.

    Returns:
        (x (batch, …), sigma (batch,)) -> d x / d sigma.
    """
    if guidance == 1:
        return lambda x, sigma: velocity(x, sigma, labels)
    both = torch.cat([labels, torch.full_like(labels, null)])

    def guided(x: Tensor, sigma: Tensor) -> Tensor:
        twice = x.repeat(2, *[1] * (x.dim() - 1))
        v_label, v_null = velocity(twice, sigma.repeat(2), both).chunk(2)
        return v_null + guidance * (v_label - v_null)

    return guided
