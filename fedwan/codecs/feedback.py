"""Error feedback around any codec: what its coding loses now is sent with the next value.

    a = e + value        sent: Q(a)        e = a - Q(a)

Seide et al. 2014; Karimireddy et al. 2019 (1901.09847), algorithm 2. So a sum over many messages is
off by no more than one message's error, whatever their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import Codec
from fedwan.state import Role, TensorSpec

__all__ = ["with_feedback"]


def with_feedback(codec: Codec) -> Codec:
    """The same on the wire; an exact codec, and one that has feedback, as they are.

    Memory: the residual, fp32, on the device of what is encoded. Time: a codec's decoding besides.
    """
    if codec.is_exact or codec.has_feedback:
        return codec

    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        owed = value.detach().to(torch.float32, copy=True).contiguous()
        if residual is not None:
            owed += residual.to(owed.device).view(owed.shape)
        record, _ = codec.encode_tensor(owed, None)
        spec = TensorSpec(tuple(owed.shape), torch.float32, Role.PARAMETER)
        codec.read_tensor(record, spec).add_to(owed, -1.0)
        return record, owed

    return codec._replace(encode_tensor=encode, has_feedback=True)
