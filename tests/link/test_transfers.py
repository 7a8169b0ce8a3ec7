"""Transfers over real mutual TLS on loopback, and through a network that fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedwan.codecs import fp32
from fedwan.codecs.payload import Bytes
from fedwan.config import LinkConfig
from fedwan.errors import FedwanError, LinkLost
from fedwan.link import client, tcp
from fedwan.link import wire_pb2 as wire
from fedwan.link.rpc import FEW_SITES, MIN_WINDOW_BYTES, WINDOWS_BYTES, window_options
from fedwan.link.tcp import Congestion
from tests.planes import (
    Bench,
    await_control,
    carry,
    dialling,
    eventually,
    header_of,
    in_thread,
    joined,
    joined_through_proxy,
    random_payload,
    read_all,
    serving,
    stub_of,
    update_request,
)

CHUNK = 1 << 16
SLOW_BYTES_PER_S = 1e6
PER_CHUNK = 30
"""At most so many bytes of framing come with a chunk."""
FIXED = 3000
"""Headers, receipts, heartbeats and the Join of a short test."""


def slack(num_bytes: int) -> int:
    return FIXED + PER_CHUNK * (num_bytes // CHUNK + 1)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, num_values=200_000)


@pytest.mark.parametrize(
    ("channels", "num_values", "packs"),
    [(2, 0, False), (1, 1000, True), (3, 500_000, False), (2, 500_000, True)],
)
def test_payloads_arrive_as_they_are_and_bytes_are_counted(
    tmp_path: Path, identities: Path, channels: int, num_values: int, packs: bool
) -> None:
    bench = Bench(tmp_path, num_values=num_values)
    with joined(bench, identities, channels=channels, packs=packs) as link:
        for way in ("up", "down"):
            payload = random_payload(len(way), bench.layout)
            before = getattr(link, f"bytes_{way}") if way == "down" else 0
            assert carry(bench, link, way, payload) == read_all(payload)
            least, most = (0.8, 0.95) if packs and num_values > 10_000 else (1.0, 1.0)
            least = least if num_values > 10_000 else 0.0
            size, counted = payload.num_bytes, getattr(link, f"bytes_{way}") - before
            assert least * size <= counted <= most * size + slack(size)


@pytest.mark.parametrize(("way", "channels"), [("up", 3), ("down", 1), ("down", 3)])
def test_a_transfer_cut_three_times_moves_again_only_what_was_missing(
    tmp_path: Path, identities: Path, way: str, channels: int
) -> None:
    bench = Bench(tmp_path, num_values=2_000_000 if way == "up" else 1_000_000)
    payload = random_payload(1, bench.layout)
    with joined_through_proxy(bench, identities, channels=channels) as (link, proxy):
        proxy.cut_after(payload.num_bytes // 4, times=3, upwards=way == "up")
        assert carry(bench, link, way, payload) == read_all(payload) and proxy.num_cuts == 3
        moved = payload.num_bytes + slack(2 * payload.num_bytes)
        # Lost upwards is what was on its way at each cut: buffers of gRPC, the proxy and the
        # kernel; three times from the start would be 12 MB.
        lost = 6_000_000
        assert link.bytes_up < moved + lost and link.bytes_down <= moved
        assert proxy.bytes_up < payload.num_bytes + lost + 100_000


def test_a_download_whose_payload_is_held_no_more_begins_anew(
    bench: Bench, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = random_payload(1, bench.layout), random_payload(2, bench.layout)
    read = first.read

    def break_off(offset: int, size: int) -> Bytes:
        if offset >= 4 * CHUNK:
            bench.publish(1, second)
            raise OSError("the stream breaks")
        return read(offset, size)

    monkeypatch.setattr(first, "read", break_off)
    with joined(bench, identities) as link:
        assert carry(bench, link, "down", first) == read_all(second)


@pytest.mark.slow
def test_patience_ends_with_what_to_check_and_a_farewell_to_nobody_is_short(
    bench: Bench, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LEAVE_PATIENCE_S", 0.5)
    with (
        serving(bench.hub, identities) as plane,
        dialling(plane.port, identities / "s1", patience_s=300.0) as link,
    ):
        link.join(bench.hello("s1"))
        await_control(bench, link, "s1")
        plane.stop(0.0)
        began = time.monotonic()
        with pytest.raises(LinkLost):
            link.leave(wire.Farewell())
    says = rf"127.0.0.1:{plane.port} could not be reached for 0.5 s"
    with dialling(plane.port, identities / "s1", patience_s=0.5) as link:
        with pytest.raises(LinkLost, match=says):
            link.join(bench.hello("s1"))
    assert time.monotonic() - began < 6


def test_an_upload_goes_out_while_its_payload_is_encoded(bench: Bench, identities: Path) -> None:
    state = {"net/w": torch.arange(200_000, dtype=torch.float32)}
    growing, failing = fp32().grow(bench.layout), fp32().grow(bench.layout)
    with joined(bench, identities) as link:
        arrived = in_thread(lambda: carry(bench, link, "up", growing))
        time.sleep(0.1)  # the stream is open and waits for bytes
        fp32().encode_into(growing, state, {}, bench.layout)
        growing.finish()
        assert arrived(10.0) == read_all(fp32().encode(state, {}, bench.layout)[0])
        receipt = in_thread(lambda: link.upload(header_of(failing, version=1), failing))
        time.sleep(0.1)
        failing.fail(MemoryError("no room"))
        with pytest.raises(FedwanError, match=r"could not be encoded \(MemoryError: no room\)"):
            receipt(5.0)


def test_a_download_does_not_wait_for_uploads(
    bench: Bench, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = random_payload(1, bench.layout)
    may, open_upload, opened = threading.Event(), bench.hub.open_upload, []

    def hold(site: str, header: wire.UploadHeader) -> Any:
        reception = open_upload(site, header)
        opened.append(reception)
        return SimpleNamespace(write=lambda *args: may.wait(20) and reception.write(*args))

    monkeypatch.setattr(bench.hub, "open_upload", hold)
    with joined(bench, identities, channels=2) as link:
        uploads = [
            in_thread(lambda v=v: link.upload(header_of(payload, version=v), payload))
            for v in (1, 2, 3)
        ]
        eventually(lambda: len(opened) >= 4)
        assert in_thread(lambda: carry(bench, link, "down", payload))(10) == read_all(payload)
        may.set()
        for upload in uploads:
            upload()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_slow_connection_is_given_fewer_chunks(
    tmp_path: Path, identities: Path, way: str
) -> None:
    bench = Bench(tmp_path, num_values=3_000_000)
    payload = random_payload(1, bench.layout)
    with joined_through_proxy(bench, identities, channels=3) as (link, proxy):
        proxy.slow_down(1, SLOW_BYTES_PER_S)  # 0 is Control's
        began = time.monotonic()
        assert carry(bench, link, way, payload) == read_all(payload)
        duration_s = time.monotonic() - began
        assert link.bytes_down < 1.01 * payload.num_bytes + 3000  # nothing comes twice
    assert duration_s < payload.num_bytes / 3 / SLOW_BYTES_PER_S / 2


def test_uploads_go_one_after_the_other(
    bench: Bench, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_upload = [], bench.hub.open_upload
    payloads = [random_payload(seed, bench.layout) for seed in range(3)]
    gates = [threading.Event() for _ in payloads]

    def note(site: str, header: wire.UploadHeader) -> Any:
        opened.append(header.version)
        return open_upload(site, header)

    def pause(payload: Any, gate: threading.Event) -> None:
        """Its later chunks come when they may."""
        read = payload.read
        payload.read = lambda at, size: (not at or gate.wait(20)) and read(at, size)

    monkeypatch.setattr(bench.hub, "open_upload", note)
    with joined(bench, identities, channels=2) as link:
        uploads = []
        for version, payload in enumerate(payloads):
            pause(payload, gates[version])
            header = header_of(payload, version=version)
            uploads.append(in_thread(lambda h=header, p=payload: link.upload(h, p)))
            time.sleep(0.05)
        eventually(lambda: 0 in opened)
        for version, gate in enumerate(gates):
            time.sleep(0.1)
            assert set(opened) == set(range(version + 1))
            gate.set()
            eventually(lambda v=version: v == 2 or v + 1 in opened)
        for upload in uploads:
            upload()


def test_a_download_that_is_cut_off_gives_up_its_place(tmp_path: Path, identities: Path) -> None:
    """Its call takes one chunk and then nothing; another site process must not wait for it."""
    bench = Bench(tmp_path, num_values=8_000_000)
    payload = random_payload(1, bench.layout)
    bench.publish(1, payload)
    with (
        serving(bench.hub, identities) as plane,
        stub_of(plane.port, identities / "s1") as stub,
        dialling(plane.port, identities / "s1", channels=1) as link,
    ):
        link.join(bench.hello("s1"))
        request = update_request()
        request.transfer = 7
        stuck = stub.Download(request)
        next(stuck)
        download = in_thread(lambda: link.download(update_request()))
        time.sleep(0.2)
        stuck.cancel()
        assert download(20).payload is not None


@pytest.mark.slow
def test_heartbeats_carry_the_step_while_an_upload_is_on_its_way(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, num_values=1_500_000, silence_s=1.0)
    payload = random_payload(1, bench.layout)
    with joined_through_proxy(bench, identities) as (link, _):
        upload = in_thread(lambda: carry(bench, link, "up", payload))
        for step in range(1, 13):
            link.heartbeat(step)
            eventually(lambda step=step: bench.registry.sites["s1"].step == step, within_s=2.0)
            with bench.hub.changed:
                assert bench.is_live("s1")
        upload()


def test_without_a_setting_it_is_four_channels_or_one_under_bbr_or_a_pace(
    identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for control, pace, num in (("cubic", 0, 4), ("cubic", 50, 1), ("bbr", 0, 1), ("bbr", 50, 1)):
        monkeypatch.setattr(tcp, "_choose", lambda setting, control=control: control)
        assert Congestion(LinkConfig(pace_mbit=pace)).num_channels == num
    with dialling(1, identities / "s1", LinkConfig(pace_mbit=50.0), channels=0) as link:
        assert link.num_channels == 1


def test_windows_are_divided_among_many_sites_and_left_alone_for_a_few() -> None:
    assert window_options(1, 4) == window_options(FEW_SITES, 4) == []
    for num_sites, channels in ((FEW_SITES + 1, 4), (16, 1), (64, 4), (64, 1)):
        options = dict(window_options(num_sites, channels))
        assert options["grpc.http2.bdp_probe"] == 0
        together = options["grpc.http2.lookahead_bytes"] * num_sites * channels
        assert 0.9 * WINDOWS_BYTES < together <= WINDOWS_BYTES
    assert dict(window_options(10_000, 16))["grpc.http2.lookahead_bytes"] == MIN_WINDOW_BYTES


def test_uploads_end_with_their_link_though_stripes_wait_for_a_thread(
    bench: Bench, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the process could not end: Python joins the threads that wait for them."""
    payload = random_payload(1, bench.layout)
    may, opened = threading.Event(), []

    def hold(site: str, header: wire.UploadHeader) -> Any:
        opened.append(header.version)
        return SimpleNamespace(write=lambda *_: may.wait(20))

    monkeypatch.setattr(bench.hub, "open_upload", hold)
    with joined(bench, identities, channels=2, patience_s=0.5) as link:
        uploads = [
            in_thread(lambda v=v: link.upload(header_of(payload, version=v), payload))
            for v in range(6)
        ]
        eventually(lambda: set(opened) == {*range(6)})
        link.close()
        may.set()
        eventually(lambda: not any(upload.is_running() for upload in uploads))
