"""The fp32 codec."""

from __future__ import annotations

import torch

from fedwan.codecs import fp32
from tests.support import spec


def test_fp32_parameters_come_out_bit_for_bit() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), generator=torch.Generator().manual_seed(1))
    value = bits.to(torch.int32).view(torch.float32)
    layout = {"w": spec((1000,))}
    payload, _ = fp32().encode({"w": value}, {}, layout)
    decoded = fp32().decode(payload, layout)["w"]
    assert torch.equal(decoded.view(torch.int32), value.view(torch.int32))


def test_a_contiguous_tensor_is_not_copied() -> None:
    value = torch.zeros(1000)
    payload, _ = fp32().encode({"w": value}, {}, {"w": spec((1000,))})
    before = bytes(payload.read(payload.num_bytes - 12, 4))
    value[-1] = 1.0
    assert before != bytes(payload.read(payload.num_bytes - 12, 4))


def test_it_is_known_to_be_exact() -> None:
    assert fp32().is_exact
