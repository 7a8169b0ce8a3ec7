"""A link that is slowed: what a transfer would have taken is waited out."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from fedwan.link import loopback
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Buffer
from fedwan.link.loopback import ShapedLink


@pytest.mark.parametrize(
    ("way", "takes_s", "waits"),
    [
        ("up", 0.0, [0.1 + 0.5]),
        ("up", 0.4, [0.2]),  # what it really took is part of what it takes
        ("up", 4.0, []),
        ("down", 5.0, [0.1 + 0.5]),  # waiting for an update is no part of its transfer
    ],
)
def test_a_transfer_takes_a_round_trip_and_its_bytes(
    monkeypatch: pytest.MonkeyPatch, way: str, takes_s: float, waits: list[float]
) -> None:
    slept: list[float] = []
    now = [0.0]

    def inner(*words: Any) -> Any:
        now[0] += takes_s
        return Delivery(wire.DownloadHeader(), payload)

    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: now[0])
    monkeypatch.setattr(loopback, "time", clock)
    payload = Buffer(500_000)
    link: Any = ShapedLink(SimpleNamespace(upload=inner, download=inner), 8.0, 100.0)  # type: ignore[arg-type]
    words = (wire.UploadHeader(), payload) if way == "up" else (wire.DownloadRequest(),)
    getattr(link, f"{way}load")(*words)
    assert slept == pytest.approx(waits)


@pytest.mark.parametrize("way", ["up", "down"])
def test_transfers_of_one_direction_share_its_rate(way: str) -> None:
    payload, spent = Buffer(25_000), list[float]()
    delivery = Delivery(wire.DownloadHeader(), payload)
    inner: Any = SimpleNamespace(upload=lambda *_: None, download=lambda _: delivery)
    link = ShapedLink(inner, 1.0, 0.0)
    words = (wire.UploadHeader(), payload) if way == "up" else (wire.DownloadRequest(),)
    began = time.monotonic()

    def transfer() -> None:
        getattr(link, f"{way}load")(*words)
        spent.append(time.monotonic() - began)

    threads = [threading.Thread(target=transfer) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(spent)[0] >= 0.19 and sorted(spent)[1] >= 0.38 and sorted(spent)[2] >= 0.57
