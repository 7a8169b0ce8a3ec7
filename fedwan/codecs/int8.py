"""int8: 8 bits a value and a scale to 128 of them, 8.125 bits in all. No error feedback.

scale = largest magnitude of the block / 127, in bf16; value = scale * code, code in -127 … 127, one
byte in two's complement. The error is at most half a scale: 1/253 of the block's largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec
from fedwan.codecs.blocks import BlockFormat, block_codec

__all__ = ["int8"]

MIN_SCALE = 2.0**-126


def _pack(values: Tensor, packed: Tensor) -> None:
    packed.copy_(torch.round(values, out=values))


def _unpack(packed: Tensor, values: Tensor) -> None:
    values.copy_(packed)


def int8() -> Codec:
    """8.125 bits a value."""
    return block_codec("int8", 3, BlockFormat(8, 127.0, MIN_SCALE, _pack, _unpack))
