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
from fedwan.link.channels import (
    FEW_SITES,
    MIN_WINDOW_BYTES,
    WINDOWS_BYTES,
    ChannelPool,
    num_channels,
    window_options,
)
from fedwan.link.tcp import Congestion
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


def test_a_setting_beats_bbr_and_pace() -> None:
    assert [num_channels(8, True, False), num_channels(2, True, True)] == [8, 2]


def test_without_a_setting_it_is_four_or_one_under_bbr_or_a_pace(
    identities: Path,
) -> None:
    cases = [num_channels(0, bbr, pace) for bbr in (False, True) for pace in (False, True)]
    assert cases == [4, 1, 1, 1]
    with dialling(1, identities / "s1", channels=0, congestion="system") as link:
        assert link.num_channels == (1 if Congestion("system").is_bbr else 4)
    with dialling(1, identities / "s1", channels=0, pace_mbit=50.0) as link:
        assert link.num_channels == 1


def test_channels_are_dialled_once_and_when_first_needed() -> None:
    dialled: list[grpc.Channel] = []

    def dial() -> grpc.Channel:
        dialled.append(grpc.insecure_channel("127.0.0.1:9"))
        return dialled[-1]

    pool = ChannelPool(dial, 3)
    assert not dialled
    assert pool.stubs() == pool.stubs()
    assert len(dialled) == 3
    pool.close()


def test_windows_are_divided_among_many_sites_and_left_alone_for_a_few() -> None:
    assert window_options(1, 4) == window_options(FEW_SITES, 4) == []
    for num_sites, channels in ((FEW_SITES + 1, 4), (16, 1), (64, 4), (64, 1)):
        options = dict(window_options(num_sites, channels))
        assert options["grpc.http2.bdp_probe"] == 0
        together = options["grpc.http2.lookahead_bytes"] * num_sites * channels
        assert 0.9 * WINDOWS_BYTES < together <= WINDOWS_BYTES


def test_a_window_is_never_too_small_for_a_part_of_a_chunk() -> None:
    assert dict(window_options(10_000, 16))["grpc.http2.lookahead_bytes"] == MIN_WINDOW_BYTES
