"""What a site does with the coordinator's answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fedwan.site.courier import Courier

from fedwan.errors import FedwanError, RunStopped
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Buffer
from fedwan.site import courier
from tests.planes import layout_of_size

Header = wire.DownloadHeader


class ScriptedLink:
    """Gives one prepared answer after another; the last one for ever."""

    def __init__(self, *answers: Delivery) -> None:
        self._answers: Iterator[Delivery] = iter(answers)
        self._last = answers[-1]
        self.requests: list[wire.DownloadRequest] = []
        self.receipt = wire.Receipt(status=wire.Receipt.ACCEPTED)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        self.requests.append(request)
        return next(self._answers, self._last)

    def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
        return self.receipt


def courier_on(link: ScriptedLink) -> Courier:
    return Courier(link, "run", layout_of_size(3), 0.5)  # type: ignore[arg-type]


def answer(status: Header.Status, version: int = 0, durable: int = 0) -> Delivery:
    return Delivery(Header(status=status, version=version, durable_version=durable), None)


def test_it_asks_until_the_update_is_there_and_listens_in_between() -> None:
    ready = Delivery(Header(status=Header.READY, version=4, durable_version=3), Buffer(8))
    link = ScriptedLink(answer(Header.NOT_YET), answer(Header.NOT_YET), ready)
    listened: list[int] = []
    arrival = courier_on(link).fetch_update(0, 4, lambda: listened.append(1))
    assert arrival.payload is ready.payload and (arrival.version, arrival.durable_version) == (4, 3)
    assert len(listened) == 2
    assert {r.wait_s for r in link.requests} == {0.5}
    assert {r.version for r in link.requests} == {4}


def test_an_update_that_is_past_is_no_payload() -> None:
    link = ScriptedLink(answer(Header.SUPERSEDED, 9))
    arrival = courier_on(link).fetch_update(0, 4, lambda: None)
    assert arrival.payload is None and arrival.version == 9


def test_a_run_that_is_over_ends_the_wait_with_the_reason_that_comes_by_signal() -> None:
    calls = []

    def between() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RunStopped("the reason")

    with pytest.raises(RunStopped, match="the reason"):
        courier_on(ScriptedLink(answer(Header.DONE))).fetch_update(0, 4, between)


def test_a_run_that_is_over_ends_the_wait_even_if_nobody_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(courier, "STOP_SIGNAL_S", 0.2)
    link = ScriptedLink(answer(Header.DONE, 3))
    began = time.monotonic()
    with pytest.raises(RunStopped, match="ended at version 3, before version 4"):
        courier_on(link).fetch_update(0, 4, lambda: None)
    assert time.monotonic() - began < 2 and len(link.requests) < 20


def test_weights_that_are_not_there_yet_are_a_clear_error() -> None:
    with pytest.raises(FedwanError, match="its run has not begun"):
        courier_on(ScriptedLink(answer(Header.NOT_YET))).fetch_global()


def test_initial_weights_that_are_refused_are_a_clear_error() -> None:
    link = ScriptedLink(answer(Header.NOT_YET))
    link.receipt = wire.Receipt(status=wire.Receipt.REJECTED, text="why")
    with pytest.raises(FedwanError, match="initial weights were refused: why"):
        courier_on(link).send_initial({"net/w": torch.zeros(3)})
