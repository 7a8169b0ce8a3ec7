"""What becomes of contributions and updates that are in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.site.stub import CoordinatorStub
from tests.site.support import asked, at_site, take_steps


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
