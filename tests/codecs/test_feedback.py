"""Error feedback around codecs that have none."""

from __future__ import annotations

import pytest
import torch

from fedwan.codecs import Codec, bf16, fp32, int4, int8, topk2, with_feedback
from fedwan.state import State
from tests.support import spec

LAYOUT = {"net/w": spec((300,)), "net/b": spec((7,))}


@pytest.mark.parametrize("codec", [int4(), int8(), bf16()], ids=lambda codec: codec.name)
def test_what_was_sent_is_off_by_what_is_owed_however_often(codec: Codec) -> None:
    fed, generator = with_feedback(codec), torch.Generator().manual_seed(0)
    assert fed.has_feedback and fed.name == codec.name
    assert fed.payload_bytes(LAYOUT) == codec.payload_bytes(LAYOUT)
    wanted: State = {name: torch.zeros(s.shape) for name, s in LAYOUT.items()}
    sent: State = {name: torch.zeros(s.shape) for name, s in LAYOUT.items()}
    plain: State = {name: torch.zeros(s.shape) for name, s in LAYOUT.items()}
    residual: State = {}
    for _ in range(200):
        values = {n: torch.randn(s.shape, generator=generator) for n, s in LAYOUT.items()}
        kept = {name: value.clone() for name, value in values.items()}
        payload, residual = fed.encode(values, residual, LAYOUT)
        without, _ = codec.encode(values, {}, LAYOUT)
        for name, coded in codec.read_each(payload, LAYOUT):
            coded.add_to(sent[name])
        for name, coded in codec.read_each(without, LAYOUT):
            coded.add_to(plain[name])
        for name, value in values.items():
            assert torch.equal(value, kept[name])
            wanted[name] += value
    for name in LAYOUT:
        torch.testing.assert_close(sent[name] + residual[name], wanted[name], atol=1e-4, rtol=1e-4)
        lost = (plain[name] - wanted[name]).square().mean()
        assert residual[name].square().mean() < 0.1 * lost


def test_exact_codecs_and_those_with_feedback_stay_as_they_are() -> None:
    assert with_feedback(fp32()).has_feedback is False
    once = with_feedback(int4())
    assert with_feedback(once) is once
    sparse = topk2()
    assert with_feedback(sparse) is sparse
