"""int8, int4 and int2: scales, short blocks, exactness, refusals."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from fedwan.codecs import Codec, int2, int4, int8
from fedwan.codecs.base import with_feedback
from fedwan.errors import PayloadError
from tests.support import spec

WIDTH = {"int8": 128, "int4": 128, "int2": 512}
LARGEST_BF16 = 0x7F7F

every_block_codec = pytest.mark.parametrize(
    "codec", [int8(), int4(), int2()], ids=lambda codec: codec.name
)


def record(codec: Codec, value: torch.Tensor) -> bytes:
    return bytes(codec.encode_tensor(value, None)[0])


def decoded(codec: Codec, data: bytes, num_values: int) -> torch.Tensor:
    return codec.read_tensor(data, spec((num_values,))).tensor()


def round_trip(codec: Codec, value: torch.Tensor) -> torch.Tensor:
    return decoded(codec, record(codec, value), value.numel())


def random_values(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


@every_block_codec
@pytest.mark.parametrize("has_residuals", [False, True])
def test_many_tensors_at_once_give_the_records_that_each_gives_alone(
    codec: Codec, has_residuals: bool
) -> None:
    shapes = [(7, 512), (3,), (), (0, 4), (130,), (5, 1001), (1024,), (257,)]
    values = [random_values(math.prod(s), i).view(s) ** 3 for i, s in enumerate(shapes)]
    values[5] = values[5].t()
    residuals = [
        random_values(v.numel(), 9).view(v.shape) if v.numel() % 2 else None for v in values
    ]
    values[4][7] = torch.nan
    has_residuals |= codec.has_feedback
    each = with_feedback(codec) if has_residuals else codec
    assert codec.encode_many is not None
    records, owed = codec.encode_many(values, residuals if has_residuals else None)
    assert len(owed) == (len(values) if has_residuals else 0)
    for index, value in enumerate(values):
        before = residuals[index] if has_residuals else None
        alone, rest = each.encode_tensor(value, before)
        assert b"".join(records[index]) == bytes(alone)
        if rest is not None:
            torch.testing.assert_close(owed[index], rest, rtol=0, atol=0, equal_nan=True)


@every_block_codec
def test_many_records_are_added_at_once_as_each_is_alone(codec: Codec) -> None:
    nums = (3584, 3, 1, 130, 5005, 1024, 257, 128)
    coded = [
        codec.read_tensor(record(codec, random_values(num, i) ** 3), spec((num,)))
        for i, num in enumerate(nums)
    ]
    targets = [random_values(num, 50 + i) for i, num in enumerate(nums)]
    alone = [target.clone() for target in targets]
    for one, target in zip(coded, alone, strict=True):
        one.add_to(target)
    assert codec.add_many is not None
    codec.add_many(coded, targets)
    assert all(map(torch.equal, targets, alone))


@pytest.mark.parametrize(("codec", "peak"), [(int8(), 127.0), (int4(), 7.0)])
def test_the_largest_value_of_a_block_keeps_its_code_whatever_the_scale_is_rounded_to(
    codec: Codec, peak: float
) -> None:
    """Else it would wrap around: nothing clamps the codes."""
    scales = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16).float()
    halfway = scales + 2.0**-8  # where rounding is worst
    each = torch.cat([scales, halfway, halfway.nextafter(torch.tensor(0.0))]).unsqueeze(1)
    value = (each * peak).repeat(1, 128)
    value[:, 64:] *= -1
    result = round_trip(codec, value.flatten()).view(-1, 128)
    assert torch.equal(result[:, 64:], -result[:, :64])
    assert torch.allclose(result, value, rtol=2.0**-8)


@every_block_codec
def test_a_decoded_value_is_the_exact_product_of_code_and_scale(codec: Codec) -> None:
    """So it has the same bits on every device, and whether or not multiply and add are fused."""
    value = random_values(128 * 500 + 77) * torch.logspace(-35, 30, 128 * 500 + 77)
    coded = codec.read_tensor(record(codec, value), spec(value.shape))
    target = random_values(len(value), 1) * value.abs()
    once = (target.double() + coded.tensor().double()).float()  # rounded once, from the exact sum
    coded.add_to(target)
    assert torch.equal(target, once)


@every_block_codec
def test_zeros_and_values_too_small_for_a_scale_become_zeros(codec: Codec) -> None:
    for value in (0.0, -0.0, 1e-45, -1e-40, 2.0**-130):
        assert not round_trip(codec, torch.full((130,), value)).any()


@every_block_codec
def test_a_scale_that_is_not_finite_or_negative_is_refused_and_any_codes_are_finite(
    codec: Codec,
) -> None:
    width = WIDTH[codec.name]
    num = 4 * width + width // 2
    for block, scale in enumerate((0x7F80, 0x7FC0, -0x0080, -1, -0x8000)):
        data = bytearray(record(codec, random_values(num)))
        struct.pack_into("<h", data, 2 * block, scale)
        with pytest.raises(PayloadError, match=rf"not finite \(scale {block} of 5"):
            codec.read_tensor(data, spec((num,)))
    data = bytearray(record(codec, torch.ones(2 * width)))
    data[4:] = (bytes(range(256)) * 8)[: len(data) - 4]
    assert bool(decoded(codec, bytes(data), 2 * width).isfinite().all())
    data = bytearray(record(codec, random_values(width)))
    struct.pack_into("<h", data, 0, LARGEST_BF16)
    assert codec.read_tensor(data, spec((width,))).sum_of_squares() == float("inf")


# Codes -------------------------------------------------------------------------------------------


def test_int2_is_as_far_off_normal_values_as_its_levels_must_be_whatever_their_size() -> None:
    value = random_values(512 * 1000)
    for exponent in (-110, 0, 110):
        scaled = value * 2.0**exponent
        result = round_trip(int2(), scaled) / 2.0**exponent
        error = (result - value).square().mean()
        assert float(error) == pytest.approx(0.145, rel=0.02)
        assert float((result.abs() < 1).float().mean()) == pytest.approx(0.80, abs=0.01)
