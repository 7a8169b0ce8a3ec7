"""The int4 codec."""

from __future__ import annotations

import torch

from fedwan.codecs import int4
from tests.support import spec


def test_a_record_has_the_bytes_that_are_documented() -> None:
    value = torch.tensor([7.0, -7.0, 0.4, 3.0, -2.0])
    data, _ = int4().encode_tensor(value, None)
    # scale 1.0 = 0x3f80; codes 7 -7 0 | 3 -2 and a zero that fills up
    assert bytes(data) == bytes.fromhex("803f 37 e9 00")


def test_the_error_is_at_most_half_a_scale() -> None:
    value = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    data, _ = int4().encode_tensor(value, None)
    decoded = int4().read_tensor(data, spec(value.shape)).tensor()
    peak = torch.nn.functional.pad(value, (0, 96)).view(-1, 128).abs().amax(1)
    bound = (peak / 7 * 0.502).repeat_interleave(128)[: len(value)]
    assert bool(((value - decoded).abs() <= bound).all())


def test_a_large_tensor_takes_4_and_an_eighth_bits_a_value() -> None:
    assert int4().record_bytes(spec((1024, 512, 4, 4))) * 8 == 4.125 * 1024 * 512 * 16


def test_codes_are_rounded_to_nearest_with_ties_to_even() -> None:
    value = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.51, 6.49])
    data, _ = int4().encode_tensor(value, None)
    decoded = int4().read_tensor(data, spec((8,))).tensor()
    assert decoded.tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, -3.0, 6.0]
