"""fp32: values as they are, exact; bf16: their upper half, relative error at most 2^-8."""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec, Coded, Plain
from fedwan.codecs.payload import Bytes, tensor_from_bytes
from fedwan.state import TensorSpec, tensor_bytes


def fp32() -> Codec:
    """32 bits a value, exact. No copy is made of a contiguous fp32 CPU tensor."""
    return _float_codec("fp32", 1, torch.float32, is_exact=True)


def bf16() -> Codec:
    """16 bits a value, rounded to nearest even."""
    return _float_codec("bf16", 2, torch.bfloat16)


def _float_codec(name: str, encoding: int, dtype: torch.dtype, is_exact: bool = False) -> Codec:
    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        return tensor_bytes(value.detach().to(dtype)), None

    def read(data: Bytes, spec: TensorSpec) -> Coded:
        return Plain(tensor_from_bytes(data, dtype, spec.shape), torch.float32)

    return Codec(
        name, encoding, encode, read, lambda spec: dtype.itemsize * spec.num_values, is_exact
    )
