"""Transfers share the channels: no direction waits for the other, no channel for a slow one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedwan.codecs.payload import Bytes
from fedwan.link import wire_pb2 as wire
from fedwan.link.lanes import PAUSE_S, Trunk
from tests.planes import (
    Bench,
    dialling,
    eventually,
    header_of,
    in_thread,
    random_payload,
    read_all,
    serving,
    update_request,
)
from tests.proxies import flaky_proxy

NUM_VALUES = 6_000_000
SLOW_BYTES_PER_S = 1e6


class Held:
    """A reception that takes nothing in until it may."""

    def __init__(self, inner: Any, may: threading.Event) -> None:
        self._inner = inner
        self._may = may

    def write(self, offset: int, data: Bytes) -> None:
        assert self._may.wait(20)
        self._inner.write(offset, data)


@pytest.mark.parametrize("channels", [1, 2])
def test_a_download_does_not_wait_for_uploads(
    tmp_path: Path, identities: Path, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=200_000)
    bench.set_model()
    payload = random_payload(1, bench.layout)
    bench.publish(1, payload)
    may, open_upload = threading.Event(), bench.hub.open_upload
    opened: list[Held] = []

    def hold(site: str, header: wire.UploadHeader) -> Any:
        opened.append(Held(open_upload(site, header), may))
        return opened[-1]

    monkeypatch.setattr(bench.hub, "open_upload", hold)
    with (
        serving(bench.hub, identities) as plane,
        dialling(plane.port, identities / "s1", channels=channels) as link,
    ):
        link.join(bench.hello("s1"))
        uploads = [
            in_thread(lambda v=v: link.upload(header_of(payload, version=v), payload))
            for v in (1, 2, 3)
        ]
        eventually(lambda: len(opened) >= 2 * channels)
        delivery = in_thread(lambda: link.download(update_request()))(10)
        assert read_all(delivery.payload) == read_all(payload)
        may.set()
        for upload in uploads:
            upload()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_slow_connection_is_given_fewer_chunks(
    tmp_path: Path, identities: Path, way: str
) -> None:
    bench = Bench(tmp_path, num_values=NUM_VALUES)
    bench.set_model()
    payload = random_payload(1, bench.layout)
    with (
        serving(bench.hub, identities) as plane,
        flaky_proxy(plane.port) as proxy,
        dialling(proxy.port, identities / "s1", channels=3) as link,
    ):
        proxy.slow_down(1, SLOW_BYTES_PER_S)  # 0 is Control's
        link.join(bench.hello("s1"))
        began = time.monotonic()
        if way == "up":
            assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
        else:
            bench.publish(1, payload)
            delivery = link.download(update_request())
            assert delivery.payload is not None
            assert read_all(delivery.payload) == read_all(payload)
            assert link.bytes_down < 1.01 * payload.num_bytes + 3000  # nothing comes twice
        duration_s = time.monotonic() - began
    bench.intake.forget(0, 0)
    fixed_s = payload.num_bytes / 3 / SLOW_BYTES_PER_S
    assert duration_s < fixed_s / 2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_channels_are_dialled_anew_after_a_pause_and_only_then() -> None:
    dialled: list[grpc.Channel] = []

    def dial() -> grpc.Channel:
        dialled.append(grpc.insecure_channel("127.0.0.1:9"))
        return dialled[-1]

    clock = Clock()
    trunk = Trunk(dial, clock)
    with trunk.lease(2, True) as stubs:
        clock.now += 2 * PAUSE_S
        with trunk.lease(3, True) as more:
            assert more[:2] == stubs and len(dialled) == 3
    with trunk.lease(3, True) as again:
        assert again == more
    clock.now += 2 * PAUSE_S
    with trunk.lease(3, False) as standing:
        assert standing == more and len(dialled) == 3
    clock.now += 2 * PAUSE_S
    with trunk.lease(2, True) as new:
        assert len(dialled) == 5 and not set(new) & set(more)
    trunk.close()


def test_transfers_over_new_connections_arrive_like_any_others(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, num_values=100_000)
    bench.set_model()
    payload = random_payload(1, bench.layout)
    with (
        serving(bench.hub, identities) as plane,
        dialling(plane.port, identities / "s1", channels=2) as link,
    ):
        link.join(bench.hello("s1"))
        link.up.stripes.is_fresh = link.down.stripes.is_fresh = True
        for version in (1, 2):
            header = header_of(payload, version=version - 1)
            assert link.upload(header, payload).status == wire.Receipt.ACCEPTED
            time.sleep(1.1 * PAUSE_S)
            bench.publish(version, payload)
            delivery = link.download(update_request(version))
            assert read_all(delivery.payload) == read_all(payload)
