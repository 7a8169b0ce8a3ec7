"""A tensor that is still coded: what a reader can do with it without a decoded copy.

Adding to a target, writing over it and measuring its norm work through blocks that stay in a
processor's cache, whatever the size of the tensor; picking values decodes little else. What a coded
tensor claims (indices, scales) was checked when it was made, so that nothing is half added when a
payload turns out to lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Coded", "Plain", "plain", "span_values", "spans"]

CPU_SPAN = 1 << 17
"""Values worked on at a time on a CPU: 512 KiB of fp32, half of a common second-level cache."""
DEVICE_SPAN = 1 << 25
"""Values at a time elsewhere: few launches, and temporaries of 128 MiB at most."""


class Coded(Protocol):
    """One tensor of a payload, as `Codec.read_each` gives it; good until the next one is taken.

    All ways to read it give the same bits. Targets have the tensor's shape and may be on any
    device; only coded bytes cross to it.
    """

    def tensor(self) -> Tensor:
        """The decoded tensor; it may share the payload's memory: do not write to it."""
        ...

    def write_to(self, target: Tensor) -> None:
        """Target = decoded, in place."""
        ...

    def add_to(self, target: Tensor, weight: float = 1.0) -> None:
        """Target += weight * decoded, in place; rounded as `target.add_(decoded, alpha=weight)`."""
        ...

    def sum_of_squares(self) -> float:
        """Of the decoded values; not finite if one of them is not, or is too large to square."""
        ...

    def pick(self, index: Tensor) -> Tensor:
        """Decoded values at these places of the flat tensor: int64 (n,), ascending, on the CPU.

        A copy, fp32 (n,). Costs of the order of n, not of the tensor.
        """
        ...


def span_values(num_values: int, device: torch.device) -> int:
    """How many values of so many to work on at a time."""
    return min(num_values, CPU_SPAN if device.type == "cpu" else DEVICE_SPAN)


def spans(num_values: int, size: int) -> Iterator[slice]:
    """Cut so many values into spans of a size; the last one may be shorter."""
    for start in range(0, num_values, max(1, size)):
        yield slice(start, min(start + size, num_values))


class Plain:
    """A tensor whose coded form is its values in some dtype: fp32, bf16 and raw records.

    Args:
        value: may share the payload's memory.
        dtype: of the decoded tensor.
    """

    def __init__(self, value: Tensor, dtype: torch.dtype | None = None) -> None:
        self._value = value
        self._dtype = dtype or value.dtype

    def tensor(self) -> Tensor:
        """See `Coded`."""
        return self._value.to(self._dtype)

    def write_to(self, target: Tensor) -> None:
        """See `Coded`."""
        target.copy_(self._value)

    def add_to(self, target: Tensor, weight: float = 1.0) -> None:
        """See `Coded`."""
        value = self._value.to(target.device)
        if value.dtype == target.dtype or not target.is_contiguous():
            target.add_(value.to(target.dtype), alpha=weight)
            return
        flat, into = value.reshape(-1), target.view(-1)
        for span in spans(len(flat), span_values(len(flat), target.device)):
            into[span].add_(flat[span].to(target.dtype), alpha=weight)

    def sum_of_squares(self) -> float:
        """See `Coded`."""
        flat = self._value.reshape(-1)
        total = 0.0
        for span in spans(len(flat), span_values(len(flat), flat.device)):
            # Half precision is widened: its squares overflow long before its values do.
            part = flat[span] if flat.dtype is torch.float64 else flat[span].float()
            total += float(torch.dot(part, part))
        return total

    def pick(self, index: Tensor) -> Tensor:
        """See `Coded`."""
        return self._value.reshape(-1)[index].to(self._dtype).float()


def plain(state: Mapping[str, Tensor]) -> dict[str, Coded]:
    """Tensors that were never coded, for who reads coded ones; no copies."""
    return {name: Plain(value) for name, value in state.items()}
