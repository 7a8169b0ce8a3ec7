"""Sites that lie, for the table of robust merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.byzantine import ATTACKS, ByzantineLink, Others
from fedwan.codecs import fp32
from fedwan.codecs.payload import Source
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.state import Layout, Role, State, layout_to_json
from tests.support import encoded, spec

LAYOUT: Layout = {"g/bn.running_mean": spec((2,), Role.MEAN), "g/w": spec((2,))}


class Wire:
    """Keeps what is uploaded."""

    def __init__(self) -> None:
        self.sent: list[State] = []

    def join(self, hello: wire.Hello) -> wire.Welcome:
        return wire.Welcome()

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        assert payload.checksum == header.checksum  # type: ignore[attr-defined]
        self.sent.append(fp32().decode(payload, LAYOUT))
        return wire.Receipt(status=wire.Receipt.ACCEPTED)


def sent(attack: str, own: list[float], honest: list[list[float]]) -> State:
    others, found = Others(len(honest)), Wire()
    for index, values in enumerate([*honest, own]):
        inner: Any = found
        lies = ATTACKS[attack] if values is own else None
        link = ByzantineLink(inner, whole, others, lies, torch.Generator().manual_seed(1))
        link.join(wire.Hello(site=f"s{index}", layout_json=layout_to_json(LAYOUT)))
        payload = encoded({name: torch.tensor(values) for name in LAYOUT}, LAYOUT)
        header = wire.UploadHeader(kind=wire.UploadHeader.CONTRIBUTION, checksum=payload.checksum)
        link.upload(header, payload)
    assert [state["g/w"].tolist() for state in found.sent[:-1]] == honest
    return found.sent[-1]


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("sign", [-50.0, -60.0]),
        ("large", [5e6, 6e6]),
        ("alie", [2.0 - 1.5 * 2**0.5, 4.0]),
        ("ipm", [-1.0, -2.0]),
    ],
)
def test_a_site_that_lies_sends_what_its_attack_says_and_honest_ones_what_they_have(
    attack: str, expected: list[float]
) -> None:
    state = sent(attack, [5.0, 6.0], [[1.0, 4.0], [3.0, 4.0]])
    torch.testing.assert_close(state["g/w"], torch.tensor(expected))
    assert state["g/bn.running_mean"].tolist() == [5.0, 6.0]
