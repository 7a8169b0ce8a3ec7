"""float4 (E3M0): a sign and an exponent of 3 bits to each value, 4.125 bits in all.

Streaming DiLoCo (2501.18512) sends its deltas so, without error feedback and without loss. The
scale is the largest magnitude of the block, in bf16; the values are 0 and ± scale * 2^-6 … 2^0, so
that small values keep their sign and size where int4 has but a zero. Each value is rounded to the
nearest power of two: the relative error is at most 1/3, and what is below 3/4 of the smallest power
becomes zero.

Code: bit 3 is the sign; the others are 0 for zero and e + 7 for 2^e. Packed as int4's codes are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec
from fedwan.codecs.blocks import BlockFormat, block_codec
from fedwan.codecs.int4 import pack_halves

__all__ = ["float4"]

MIN_SCALE = 2.0**-120
_MAGNITUDE = 0x7FFF_FFFF
_HALF = 0x0040_0000
"""Half of a binary32's mantissa: added to the bits, it carries from 1.5 on into the exponent."""
_SIGN_AND_CODE = 0x0380_0000 - (1 << 31)
"""Bit 31, and bits 25 to 23."""
_LIFT = 2.0**120
"""From the exponent that a code has in the lowest bits of the field to the one that it means."""


def _pack(values: Tensor, packed: Tensor) -> None:
    bits = values.view(torch.int32)
    sign = (bits >> 28).bitwise_and_(8)
    # |value| rounded to a power of two 2^e: the exponent field is 127 + e, the code e + 7.
    code = bits.bitwise_and_(_MAGNITUDE).add_(_HALF).bitwise_right_shift_(23)
    code.sub_(120).clamp_(0, 7).bitwise_or_(sign)
    pack_halves(code.to(torch.int8), packed)


def _unpack(packed: Tensor, values: Tensor) -> None:
    # A code s eee goes to the sign and the lowest exponent bits of a binary32: 2^(eee - 127), and
    # zero for 000. Multiplying by a power of two lifts it where it belongs, without rounding.
    half = packed.shape[1]
    bits = values.view(torch.int32)
    bits[:, :half].copy_(packed << 4)
    bits[:, half:].copy_(packed & -16)
    bits.bitwise_left_shift_(19).bitwise_and_(_SIGN_AND_CODE)
    values.mul_(_LIFT)


def float4() -> Codec:
    """4.125 bits a value."""
    return block_codec("float4", 5, BlockFormat(4, 1.0, MIN_SCALE, _pack, _unpack))
