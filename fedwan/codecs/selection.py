"""The largest magnitudes of each row, exactly, about twice as fast as `torch.topk` on its own.

A row of 4096 is seen as 256 groups of 16. The 64 largest values lie in the 64 groups with the
largest maxima: a value outside has 64 groups before it, each with a value at least as large. Those
groups' 1024 values are cut down to 256 in the same way, and `topk` has only those to look at.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["largest"]

_GROUPS = 256
"""Groups per row at each stage; a power of two above any k that is asked for."""


def largest(magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, in descending order, NaN before all: (values, indices), [rows, k].

    Of equal values, any may be chosen, the same ones every time.

    >>> values, indices = largest(torch.tensor([[0.0, 3.0, 1.0]]), 2)
    >>> values.tolist(), indices.tolist()
    ([[3.0, 1.0]], [[1, 2]])
    """
    width = magnitudes.shape[1]
    if k >= _GROUPS or width < 4 * _GROUPS or width % _GROUPS or k & (k - 1):
        return torch.topk(magnitudes, k, dim=1)
    # Group g is every 256th value from g on, so that maxima are taken along whole cache lines.
    by_group = magnitudes.view(len(magnitudes), -1, _GROUPS)
    group = by_group.amax(1).topk(k, 1, sorted=False).indices
    chosen = by_group.gather(2, group.unsqueeze(1).expand(-1, by_group.shape[1], -1))
    values, among = largest(chosen.view(len(magnitudes), -1), k)
    # Value `among` of the chosen is member among // k of group among % k; k is a power of two.
    member = among >> (k.bit_length() - 1)
    return values, group.gather(1, among & (k - 1)).add_(member * _GROUPS)
