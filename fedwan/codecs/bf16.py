"""bf16: the upper half of fp32, 2 bytes a value, relative error at most 2^-8. No error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec
from fedwan.codecs.coded import Coded, Plain
from fedwan.codecs.payload import Bytes, tensor_bytes, tensor_from_bytes
from fedwan.state import TensorSpec

__all__ = ["bf16"]


def _encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
    return tensor_bytes(value.detach().to(torch.bfloat16)), None


def _read(data: Bytes, spec: TensorSpec) -> Coded:
    return Plain(tensor_from_bytes(data, torch.bfloat16, spec.shape), torch.float32)


def bf16() -> Codec:
    """16 bits a value, rounded to nearest even."""
    return Codec("bf16", 2, _encode, _read, lambda spec: 2 * spec.num_values)
