"""What becomes of contributions and updates that are in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedwan.errors import PayloadError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.site.replica import Replica
from fedwan.site.stub import CoordinatorStub
from tests.site.support import Ended, Ran, asked, at_site, take_steps


def test_what_ended_one_flight_is_told_when_another_makes_the_site_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: CoordinatorStub, payload: Any, header: wire.UploadHeader) -> wire.Receipt:
        if header.kind == wire.UploadHeader.INITIAL:
            return real(self, payload, header)
        if header.fragment:
            raise PayloadError("torn")
        return wire.Receipt(status=wire.Receipt.REJECTED, text="not finite")

    real = CoordinatorStub.send_contribution
    monkeypatch.setattr(CoordinatorStub, "send_contribution", send)
    config = asked("strategy=streaming_diloco", "stream.fragments=2", "stream.tau=3", "steps=16")
    with pytest.raises(PayloadError, match="torn"):
        at_site(config, tmp_path, take_steps)


def overflow_once(call: int, keep: Callable[[nn.Module], object] = lambda net: None) -> Ended:
    """A batch that makes weights which are no numbers; `keep` gets the network."""
    left = [call]

    def spoil(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        left[0] -= 1
        return args if left[0] else tuple(arg * float("nan") for arg in args)

    def spoilt(net: nn.Module) -> None:
        net.register_forward_pre_hook(spoil)
        keep(net)

    return take_steps(keep=spoilt)


def test_fragments_that_one_overflow_has_spoilt_together_are_one_try(tmp_path: Path) -> None:
    words = ["strategy=streaming_diloco", "stream.fragments=4", "stream.tau=3", "steps=16"]
    ran = at_site(asked(*words), tmp_path, lambda: overflow_once(8))
    assert isinstance(ran, Ran) and ran.sha256 == {ran.ended.sha256}
    refused = [row for row in ran.records if row.get("event") == "rejected"]
    assert len(refused) >= 3, refused


def test_what_is_a_sites_own_is_put_back_after_an_overflow(tmp_path: Path) -> None:
    nets: list[nn.Module] = []
    words = ["strategy=diloco", "steps=16", 'network.net.exclude=["6.*"]']
    ran = at_site(asked(*words), tmp_path, lambda: overflow_once(10, nets.append))
    (refused,) = [row for row in ran.records if row.get("event") == "rejected"]
    assert "not finite" in refused["text"]
    assert all(bool(value.isfinite().all()) for value in nets[0].parameters())


def test_what_half_precision_rounds_away_as_an_update_lands_is_no_step_of_the_site() -> None:
    net = nn.Linear(8, 8).bfloat16()
    replica = Replica({"net": net}, {"net": torch.optim.SGD(net.parameters(), lr=0.1)})
    (fragment,) = whole(replica.layout)
    for value in replica.base.values():
        value.add_(1e-4)
    replica.land(fragment, 0.0)
    for taken in (replica.delta(fragment), replica.take_delta(fragment, {})):
        assert not any(bool(delta.any()) for delta in taken.values())
