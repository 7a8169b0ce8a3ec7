"""Transfers over real mutual TLS on loopback, and through a network that fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.codecs import fp32
from fedwan.codecs.payload import Bytes
from fedwan.errors import FedwanError, LinkLost
from fedwan.link import client
from fedwan.link import wire_pb2 as wire
from fedwan.link.rpc import (
    FEW_SITES,
    MIN_WINDOW_BYTES,
    WINDOWS_BYTES,
    num_channels,
    window_options,
)
from tests.planes import (
    Bench,
    await_control,
    dialling,
    eventually,
    header_of,
    in_thread,
    joined,
    joined_through_proxy,
    random_payload,
    read_all,
    serving,
    update_request,
)

CHUNK = 1 << 16
NUM_VALUES = 3_000_000
SLOW_BYTES_PER_S = 1e6
PER_CHUNK = 30
"""At most so many bytes of framing come with a chunk."""
FIXED = 3000
"""Headers, receipts, heartbeats and the Join of a short test."""


def slack(num_bytes: int, chunk: int = CHUNK) -> int:
    return FIXED + PER_CHUNK * (num_bytes // chunk + 1)


@pytest.mark.parametrize(
    ("channels", "num_values", "packs"),
    [(2, 0, False), (1, 1000, True), (3, 500_000, False), (2, 500_000, True)],
)
def test_payloads_arrive_as_they_are_and_bytes_are_counted(
    tmp_path: Path, identities: Path, channels: int, num_values: int, packs: bool
) -> None:
    bench = Bench(tmp_path, num_values=num_values)
    up, down = random_payload(1, bench.layout), random_payload(2, bench.layout)
    with joined(bench, identities, channels=channels, packs=packs) as link:
        assert link.upload(header_of(up), up).status == wire.Receipt.ACCEPTED
        contribution = bench.contribution("s1")
        assert contribution is not None and read_all(contribution.payload) == read_all(up)
        least, most = (0.8, 0.95) if packs and num_values > 10_000 else (1.0, 1.0)
        least = least if num_values > 10_000 else 0.0
        sent = up.num_bytes
        assert least * sent <= link.bytes_up <= most * sent + slack(sent)

        bench.publish(1, down)
        before = link.bytes_down
        delivery = link.download(update_request())
        assert delivery.payload is not None and read_all(delivery.payload) == read_all(down)
        received = down.num_bytes
        assert least * received <= link.bytes_down - before <= most * received + slack(received)


@pytest.mark.parametrize(("way", "channels"), [("up", 3), ("down", 1), ("down", 3)])
def test_a_transfer_cut_three_times_moves_again_only_what_was_missing(
    tmp_path: Path, identities: Path, way: str, channels: int
) -> None:
    is_up = way == "up"
    bench = Bench(tmp_path, num_values=2_000_000 if is_up else 1_000_000)
    payload = random_payload(1, bench.layout)
    with joined_through_proxy(bench, identities, channels=channels) as (link, proxy):
        proxy.cut_after(payload.num_bytes // 4, times=3, upwards=is_up)
        moved = payload.num_bytes + slack(2 * payload.num_bytes)
        if is_up:
            assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
            arrived = bench.contribution("s1")
            # Lost is what was on its way at each cut: buffers of gRPC, the proxy and the kernel.
            lost = 6_000_000  # three times from the start would be 12 MB
            assert link.bytes_up < moved + lost
            assert proxy.bytes_up < payload.num_bytes + lost + 100_000
        else:
            bench.publish(1, payload)
            arrived = link.download(update_request())
            assert link.bytes_down <= moved
        assert proxy.num_cuts == 3
        assert arrived is not None and read_all(arrived.payload) == read_all(payload)


def test_a_download_whose_payload_is_held_no_more_begins_anew(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=200_000)
    first, second = random_payload(1, bench.layout), random_payload(2, bench.layout)
    bench.publish(1, first)
    read = first.read

    def break_off(offset: int, size: int) -> Bytes:
        if offset >= 4 * CHUNK:
            bench.publish(1, second)
            raise OSError("the stream breaks")
        return read(offset, size)

    monkeypatch.setattr(first, "read", break_off)
    with joined(bench, identities) as link:
        delivery = link.download(update_request())
        assert delivery.payload is not None and read_all(delivery.payload) == read_all(second)


def test_patience_ends_with_what_to_check_and_a_farewell_to_nobody_is_short(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.LEAVE_PATIENCE_S <= 10
    monkeypatch.setattr(client, "LEAVE_PATIENCE_S", 0.5)
    bench = Bench(tmp_path)
    with serving(bench.hub, identities) as plane:
        port = plane.port
        with dialling(port, identities / "s1", patience_s=300.0) as link:
            link.join(bench.hello("s1"))
            await_control(bench, link, "s1")
            plane.stop(0.0)
            began = time.monotonic()
            with pytest.raises(LinkLost):
                link.leave(wire.Farewell())
    with dialling(port, identities / "s1", patience_s=0.5) as link:
        with pytest.raises(LinkLost, match=rf"127.0.0.1:{port} could not be reached for 0.5 s"):
            link.join(bench.hello("s1"))
    assert time.monotonic() - began < 6


def test_an_upload_goes_out_while_its_payload_is_encoded(tmp_path: Path, identities: Path) -> None:
    bench = Bench(tmp_path, num_values=200_000)
    value = torch.arange(200_000, dtype=torch.float32)
    growing, failing = fp32().grow(bench.layout), fp32().grow(bench.layout)
    with joined(bench, identities) as link:
        receipt = in_thread(lambda: link.upload(header_of(growing), growing))
        time.sleep(0.1)  # the stream is open and waits for bytes
        fp32().encode_into(growing, {"net/w": value}, {}, bench.layout)
        assert receipt(10.0).status == wire.Receipt.ACCEPTED
        contribution = bench.contribution("s1")
        assert contribution is not None
        whole, _ = fp32().encode({"net/w": value}, {}, bench.layout)
        assert read_all(contribution.payload) == read_all(whole)
        receipt = in_thread(lambda: link.upload(header_of(failing, version=1), failing))
        time.sleep(0.1)
        failing.fail(MemoryError("no room"))
        with pytest.raises(FedwanError, match=r"could not be encoded \(MemoryError: no room\)"):
            receipt(5.0)


class Held:
    """A reception that takes nothing in until it may."""

    def __init__(self, inner: Any, may: threading.Event) -> None:
        self._inner = inner
        self._may = may

    def write(self, offset: int, data: Bytes) -> None:
        assert self._may.wait(20)
        self._inner.write(offset, data)


def test_a_download_does_not_wait_for_uploads(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = 2
    bench = Bench(tmp_path, num_values=200_000)
    payload = random_payload(1, bench.layout)
    bench.publish(1, payload)
    may, open_upload = threading.Event(), bench.hub.open_upload
    opened: list[Held] = []

    def hold(site: str, header: wire.UploadHeader) -> Any:
        opened.append(Held(open_upload(site, header), may))
        return opened[-1]

    monkeypatch.setattr(bench.hub, "open_upload", hold)
    with joined(bench, identities, channels=channels) as link:
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
    payload = random_payload(1, bench.layout)
    with joined_through_proxy(bench, identities, channels=3) as (link, proxy):
        proxy.slow_down(1, SLOW_BYTES_PER_S)  # 0 is Control's
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
    fixed_s = payload.num_bytes / 3 / SLOW_BYTES_PER_S
    assert duration_s < fixed_s / 2


def test_without_a_setting_it_is_four_channels_or_one_under_bbr_or_a_pace(
    identities: Path,
) -> None:
    cases = [num_channels(bbr, pace) for bbr in (False, True) for pace in (False, True)]
    assert cases == [4, 1, 1, 1]
    with dialling(1, identities / "s1", channels=0, pace_mbit=50.0) as link:
        assert link.num_channels == 1


def test_windows_are_divided_among_many_sites_and_left_alone_for_a_few() -> None:
    assert window_options(1, 4) == window_options(FEW_SITES, 4) == []
    for num_sites, channels in ((FEW_SITES + 1, 4), (16, 1), (64, 4), (64, 1)):
        options = dict(window_options(num_sites, channels))
        assert options["grpc.http2.bdp_probe"] == 0
        together = options["grpc.http2.lookahead_bytes"] * num_sites * channels
        assert 0.9 * WINDOWS_BYTES < together <= WINDOWS_BYTES
    assert dict(window_options(10_000, 16))["grpc.http2.lookahead_bytes"] == MIN_WINDOW_BYTES
