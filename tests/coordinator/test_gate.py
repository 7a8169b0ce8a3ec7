"""The gate refuses what would spoil the global state, in one line."""

from __future__ import annotations

import math

import pytest
import torch

from fedwan.codecs import Codec, bf16, float4, fp32, int4, int8, topk2
from fedwan.coordinator.gate import inspect
from fedwan.errors import PayloadError
from fedwan.state import Layout, Role, State
from tests.support import StrictSource, encoded, read_all, spec

LAYOUT: Layout = {
    "d/weight": spec((3,)),
    "g/bias": spec(()),
    "g/bn.num_batches_tracked": spec((), Role.COUNTER, torch.int64),
    "g/bn.running_mean": spec((2,), Role.MEAN),
    "g/bn.running_var": spec((2,), Role.VARIANCE),
    "g/empty": spec((0,)),
    "g/weight": spec((2, 2)),
}


every_codec = pytest.mark.parametrize(
    "codec", [fp32(), bf16(), int8(), int4(), float4(), topk2()], ids=lambda codec: codec.name
)


def good() -> State:
    return {
        "d/weight": torch.tensor([1.0, 2.0, 2.0]),
        "g/bias": torch.tensor(3.0),
        "g/bn.num_batches_tracked": torch.tensor(4),
        "g/bn.running_mean": torch.tensor([100.0, -100.0]),
        "g/bn.running_var": torch.tensor([0.0, 1.0]),
        "g/empty": torch.zeros(0),
        "g/weight": torch.tensor([[2.0, 0.0], [0.0, 6.0]]),
    }


def refusal(state: State, codec: Codec | None = None) -> str:
    codec = codec or fp32()
    payload, _ = codec.encode(state, {}, LAYOUT)
    with pytest.raises(PayloadError) as raised:
        inspect(payload, LAYOUT, codec)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_norms_are_those_of_each_networks_parameters_alone() -> None:
    norms = inspect(encoded(good(), LAYOUT), LAYOUT, fp32())
    assert norms == pytest.approx({"d": 3.0, "g": 7.0})


@every_codec
def test_norms_of_many_values_are_those_of_what_is_decoded(codec: Codec) -> None:
    value = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    layout = {"g/w": spec(value.shape)}
    payload, _ = codec.encode({"g/w": value}, {}, layout)
    expected = codec.decode(payload, layout)["g/w"].double().norm()
    assert inspect(payload, layout, codec)["g"] == pytest.approx(float(expected), rel=1e-4)


@every_codec
@pytest.mark.parametrize("name", ["d/weight", "g/bias", "g/bn.running_mean", "g/bn.running_var"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(codec: Codec, name: str, value: float) -> None:
    state = good()
    state[name].view(-1)[-1] = value
    text = refusal(state, codec)
    assert repr(name) in text and "not finite" in text and "clip" in text


def test_a_value_too_large_to_square_is_refused() -> None:
    state = good()
    state["g/weight"][0, 0] = 1e30
    assert "too large" in refusal(state)


def test_a_negative_variance_is_refused() -> None:
    state = good()
    state["g/bn.running_var"][0] = -1e-9
    assert "'g/bn.running_var' is below zero" in refusal(state)


def test_a_half_precision_buffer_is_not_refused_for_what_its_square_would_be() -> None:
    layout = {"g/mean": spec((2,), Role.MEAN, torch.float16)}
    state = {"g/mean": torch.tensor([60000.0, 60000.0]).half()}
    assert inspect(encoded(state, layout), layout, fp32()) == {}


def test_a_damaged_payload_is_refused() -> None:
    data = bytearray(read_all(encoded(good(), LAYOUT)))
    data[-20] ^= 1
    with pytest.raises(PayloadError, match="checksum"):
        inspect(StrictSource(bytes(data)), LAYOUT, fp32())
