"""Scales in bf16, as codecs put them in front of their codes."""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.errors import PayloadError

__all__ = ["check_scales"]

_INFINITY = 0x7F80
"""Infinity in bf16, as an integer; below it are zero and the positive finite numbers."""


def check_scales(scales: Tensor) -> None:
    """Refuse scales that no sender of finite values would make.

    Args:
        scales: bf16, seen as int16, [num].

    Raises:
        PayloadError: one is negative or not finite.
    """
    if not len(scales):
        return
    low, high = scales.aminmax()
    if low < 0 or high >= _INFINITY:
        bad = int(((scales < 0) | (scales >= _INFINITY)).nonzero()[0])
        seen = float(scales[bad : bad + 1].view(torch.bfloat16))
        raise PayloadError(
            f"holds values that are not finite (scale {bad} of {len(scales)} is {seen}); "
            "lower the inner learning rate or clip the gradients at that site"
        )
