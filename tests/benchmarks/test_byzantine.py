"""Sites that lie, for the table of robust merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import byzantine
from benchmarks.byzantine import ATTACKS, ByzantineLink, Case, Others
from benchmarks.harness.table import read_arguments
from fedwan.codecs import fp32
from fedwan.errors import FedwanError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.state import Layout, Role, layout_to_json
from tests.support import encoded, spec

LAYOUT: Layout = {"g/bn.running_mean": spec((2,), Role.MEAN), "g/w": spec((2,))}


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
    class Wire:
        def join(self, hello: Any) -> None: ...

        def upload(self, header: Any, payload: Any) -> None:
            assert payload.checksum == header.checksum
            sent.append(fp32().decode(payload, LAYOUT))

    sent: list[Any] = []
    inner: Any = Wire()
    others, of = Others(2), wire.UploadHeader
    for site, values in (("s1", [1.0, 4.0]), ("s2", [3.0, 4.0]), ("s3", [5.0, 6.0])):
        lies = ATTACKS[attack] if site == "s3" else None
        link = ByzantineLink(inner, whole, others, lies, torch.Generator())
        link.join(wire.Hello(site=site, layout_json=layout_to_json(LAYOUT)))
        payload = encoded({name: torch.tensor(values) for name in LAYOUT}, LAYOUT)
        link.upload(of(kind=of.CONTRIBUTION, checksum=payload.checksum), payload)
    assert [state["g/w"].tolist() for state in sent[:2]] == [[1.0, 4.0], [3.0, 4.0]]
    torch.testing.assert_close(sent[2]["g/w"], torch.tensor(expected))
    assert sent[2]["g/bn.running_mean"].tolist() == [5.0, 6.0]


def test_a_run_that_ends_before_has_its_error_and_is_counted_in_its_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: Any, **__: Any) -> Any:
        raise FedwanError("no number")

    monkeypatch.setattr(byzantine, "run_simulated", end)
    args = read_arguments(byzantine, "byzantine", ["--quick"])
    row = byzantine.measure_case(args, Case("flow", "diloco", 4, "large", "mean"), 0)
    assert (row["fd"], row["ended"]) == (None, "no number")
    lines = list(byzantine.summarise([row, row | {"fd": 3.0}]))
    case = "flow, diloco, 1, 4, large, mean"
    assert lines == [f"{case}: fd 3.000", f"{case}: 1 of 2 runs ended before"]
