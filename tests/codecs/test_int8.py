"""The int8 codec."""

from __future__ import annotations

import torch

from fedwan.codecs import int8
from tests.support import spec


def test_a_record_has_the_bytes_that_are_documented() -> None:
    data, _ = int8().encode_tensor(torch.tensor([254.0, -254.0, 1.0, 3.0, -2.0]), None)
    # scale 2.0 = 0x4000; codes 127 -127 0 (ties to even) 2 -1
    assert bytes(data) == bytes.fromhex("0040 7f 81 00 02 ff")


def test_the_error_is_at_most_half_a_scale() -> None:
    value = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    data, _ = int8().encode_tensor(value, None)
    decoded = int8().read_tensor(data, spec(value.shape)).tensor()
    peak = torch.nn.functional.pad(value, (0, 96)).view(-1, 128).abs().amax(1)
    bound = (peak / 127 * 0.502).repeat_interleave(128)[: len(value)]
    assert bool(((value - decoded).abs() <= bound).all())


def test_a_large_tensor_takes_8_and_an_eighth_bits_a_value() -> None:
    assert int8().record_bytes(spec((1024, 512, 4, 4))) * 8 == 8.125 * 1024 * 512 * 16
