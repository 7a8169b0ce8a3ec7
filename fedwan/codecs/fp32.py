"""fp32: values as they are, 4 bytes each. No copy is made of a contiguous fp32 CPU tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec
from fedwan.codecs.coded import Coded, Plain
from fedwan.codecs.payload import Bytes, tensor_bytes, tensor_from_bytes
from fedwan.state import TensorSpec

__all__ = ["fp32"]


def _encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
    return tensor_bytes(value.detach().float()), None


def _read(data: Bytes, spec: TensorSpec) -> Coded:
    return Plain(tensor_from_bytes(data, torch.float32, spec.shape), torch.float32)


def fp32() -> Codec:
    """32 bits a value, exact."""
    return Codec("fp32", 1, _encode, _read, lambda spec: 4 * spec.num_values, True)
