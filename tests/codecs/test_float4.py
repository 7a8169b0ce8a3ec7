"""The float4 codec."""

from __future__ import annotations

import torch

from fedwan.codecs import float4
from tests.support import spec


def round_trip(value: torch.Tensor) -> torch.Tensor:
    data, _ = float4().encode_tensor(value, None)
    return float4().read_tensor(data, spec(value.shape)).tensor()


def test_a_record_has_the_bytes_that_are_documented() -> None:
    data, _ = float4().encode_tensor(torch.tensor([3.0, -1.5, 0.0, 0.75, -0.046875]), None)
    # scale 3.0 = 0x4040; codes 7 8+6 0 | 5 8+1 and a zero that fills up
    assert bytes(data) == bytes.fromhex("4040 57 9e 00")


def test_each_value_goes_to_the_nearest_power_of_two_below_the_scale() -> None:
    powers = 2.0 ** -torch.arange(7.0)
    assert torch.equal(round_trip(powers), powers)
    assert torch.equal(round_trip(-powers), -powers)
    assert round_trip(torch.tensor([1.0, 0.751, 0.749, 0.376, 0.374])).tolist() == [
        1.0,
        1.0,
        0.5,
        0.5,
        0.25,
    ]


def test_what_is_below_three_quarters_of_the_smallest_power_becomes_zero() -> None:
    value = torch.tensor([1.0, 0.751 / 64, 0.749 / 64, -0.749 / 64])
    decoded = round_trip(value)
    assert decoded.tolist() == [1.0, 1 / 64, 0.0, 0.0]


def test_small_values_keep_their_sign_where_int4_has_a_zero() -> None:
    value = torch.full((128,), -0.02)
    value[0] = 1.0
    assert bool((round_trip(value)[1:] < 0).all())


def test_the_relative_error_is_at_most_a_third_above_the_smallest_power() -> None:
    value = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    decoded = round_trip(value)
    kept = decoded != 0
    # 2^-8 more for the scale, which is rounded to bf16 itself
    assert bool(((value - decoded).abs() <= (1 / 3 + 2**-8) * value.abs())[kept].all())
    assert float(kept.float().mean()) > 0.95
