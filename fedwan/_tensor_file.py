"""The bytes of a safetensors file, tensor by tensor; `fedwan.state` writes and reads whole files.

A file is the length of its table (8 bytes, little-endian), the table in JSON, and the tensors'
bytes one after the other (huggingface.co/docs/safetensors). `safetensors.torch.save_file` writes
the same, but wants all tensors in host memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["head", "raw"]

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with.

    Args:
        tensors: in the order in which their bytes will follow; of each, dtype and shape matter.
        metadata: of the file.
    """
    rows: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.numel() * value.element_size()
        rows[name] = {
            "dtype": _DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(value: Tensor) -> memoryview:
    """A tensor's bytes, which the view keeps alive; a copy where it lies elsewhere or scattered."""
    flat = value.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data
