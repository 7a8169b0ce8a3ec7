"""The bf16 codec."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.codecs import bf16
from tests.support import spec

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(st.lists(finite.filter(lambda x: x == 0 or abs(x) > 2.0**-126), min_size=1, max_size=20))
def test_the_relative_error_is_at_most_2_to_the_minus_8(values: list[float]) -> None:
    value = torch.tensor(values)
    layout = {"w": spec(value.shape)}
    payload, _ = bf16().encode({"w": value}, {}, layout)
    decoded = bf16().decode(payload, layout)["w"].double()
    # Rounds to infinity only beyond bf16's own largest value.
    inside = value.abs() <= torch.finfo(torch.bfloat16).max
    error = (decoded - value.double()).abs()[inside]
    assert bool((error <= value.double().abs()[inside] * 2.0**-8).all())


def test_ties_round_to_even() -> None:
    value = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    layout = {"w": spec((2,))}
    payload, _ = bf16().encode({"w": value}, {}, layout)
    assert bf16().decode(payload, layout)["w"].tolist() == [1.0, 1 + 2 * 2.0**-7]


def test_a_parameter_takes_two_bytes_a_value() -> None:
    more, fewer = (bf16().payload_bytes({"w": spec((n,))}) for n in (1000, 0))
    assert more - fewer == 2000
