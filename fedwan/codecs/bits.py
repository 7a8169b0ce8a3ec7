"""Packing of small unsigned integers and of ascending indices into bytes, in plain torch.

Bits are filled from the lowest one of the first byte on.

Ascending indices are written as Elias and Fano do: the low bits of each as they are, and of the
upper parts a string of bits in which the one of rank i stands at (upper part + i). k indices out of
64 k values then cost 6 + 2 = 8 bits each, where a plain 12-bit number would cost half as much
again and the binomial coefficient's logarithm is 7.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOW_BITS", "pack", "pack_ascending", "unpack", "unpack_ascending"]

LOW_BITS = 6
"""One index in 2^6 values."""
_SHAPES = {1: (8, 1), 2: (4, 1), 6: (4, 3)}
"""Bits -> (numbers, bytes) after which a new byte begins."""


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits to bytes: int64 [rows, n] to uint8 [rows, ceil(n / per) * size].

    >>> pack(torch.tensor([[1, 2, 3, 0, 1]]), 2).tolist()
    [[57, 1]]
    """
    per, size = _SHAPES[bits]
    rows, count = numbers.shape
    padded = torch.nn.functional.pad(numbers, (0, -count % per)).view(rows, -1, per)
    shifts = torch.arange(0, per * bits, bits, device=numbers.device)
    words = (padded << shifts).sum(2)
    return words.view(torch.uint8).view(rows, -1, 8)[:, :, :size].reshape(rows, -1)


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`, for `count` numbers in each row."""
    per, size = _SHAPES[bits]
    rows = len(data)
    parts = data.view(rows, -1, size).long()
    words = (parts << torch.arange(0, 8 * size, 8, device=data.device)).sum(2, keepdim=True)
    shifts = torch.arange(0, per * bits, bits, device=data.device)
    numbers = (words >> shifts) & ((1 << bits) - 1)
    return numbers.view(rows, -1)[:, :count]


def pack_ascending(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Strictly ascending indices below 64 k, int64 [rows, k], as (upper parts, low bits)."""
    rows, count = indices.shape
    rank = torch.arange(count, device=indices.device)
    ones = indices.new_zeros(rows, 2 * count)
    ones.scatter_(1, (indices >> LOW_BITS) + rank, 1)
    return pack(ones, 1), pack(indices & ((1 << LOW_BITS) - 1), LOW_BITS)


def unpack_ascending(upper: Tensor, low: Tensor, count: int) -> Tensor | None:
    """The inverse of `pack_ascending`; None if they are not `count` ascending indices a row.

    They may still be too large.
    """
    ones = unpack(upper, 1, 2 * count)
    if bool((ones.sum(1) != count).any()):
        return None
    rank = torch.arange(count, device=upper.device)
    above = ones.nonzero()[:, 1].view(-1, count) - rank
    indices = (above << LOW_BITS) | unpack(low, LOW_BITS, count)
    if bool((indices[:, 1:] <= indices[:, :-1]).any()):
        return None
    return indices
