"""int4: 4 bits a value and a scale to 128 of them, 4.125 bits in all. No error feedback.

scale = largest magnitude of the block / 7, in bf16; value = scale * code, code in -7 … 7. The error
is at most half a scale, so about 1/14 of the block's largest value. Byte j of a block of w values
holds the code of value j in its lower half and that of value j + ceil(w / 2) in its upper half,
both in two's complement: the halves of a block lie side by side, so that packing moves whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec
from fedwan.codecs.blocks import BlockFormat, block_codec

__all__ = ["int4", "pack_halves", "unpack_halves"]

MIN_SCALE = 2.0**-126


def pack_halves(codes: Tensor, packed: Tensor) -> None:
    """Two codes to a byte: int8 [rows, width], width even, to int8 [rows, width / 2]."""
    half = codes.shape[1] // 2
    torch.bitwise_or(codes[:, :half] & 15, codes[:, half:] << 4, out=packed)


def unpack_halves(packed: Tensor, values: Tensor) -> None:
    """The codes, -8 to 7, as fp32: int8 [rows, bytes] to [rows, 2 bytes]."""
    half = packed.shape[1]
    code = packed << 4
    values[:, :half].copy_(code.bitwise_right_shift_(4))
    values[:, half:].copy_(torch.bitwise_right_shift(packed, 4, out=code))


def _pack(values: Tensor, packed: Tensor) -> None:
    pack_halves(values.round_().to(torch.int8), packed)


def int4() -> Codec:
    """4.125 bits a value."""
    return block_codec("int4", 4, BlockFormat(4, 7.0, MIN_SCALE, _pack, unpack_halves))
