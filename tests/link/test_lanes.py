"""Transfers share the channels: no direction waits for the other, no channel for a slow one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedwan.codecs.payload import Bytes, Source
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
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

NUM_VALUES = 10_000_000
CHUNK = 1 << 19
NUM_CHUNKS = NUM_VALUES * 4 // CHUNK


class Held:
    """A reception that takes nothing in until it may."""

    def __init__(self, inner: Any, may: threading.Event) -> None:
        self._inner = inner
        self._may = may

    def write(self, offset: int, data: Bytes) -> None:
        assert self._may.wait(20)
        self._inner.write(offset, data)


class Slow:
    """A reception or a payload that takes its time for every chunk, and counts them."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.num_chunks = 0

    @property
    def num_bytes(self) -> int:
        return int(self._inner.num_bytes)

    def _wait(self) -> None:
        self.num_chunks += 1
        time.sleep(self._seconds)

    def write(self, offset: int, data: Bytes) -> None:
        self._wait()
        self._inner.write(offset, data)

    def read(self, offset: int, size: int) -> Bytes:
        self._wait()
        data: Bytes = self._inner.read(offset, size)
        return data


@pytest.mark.parametrize("channels", [1, 2])
def test_a_download_does_not_wait_for_uploads(
    tmp_path: Path, identities: Path, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=200_000)
    bench.set_model()
    payload = random_payload(1, bench.layout)
    bench.publish(1, payload)
    may, open_upload = threading.Event(), bench.desk.open_upload
    opened: list[Held] = []

    def hold(site: str, header: wire.UploadHeader) -> Any:
        opened.append(Held(open_upload(site, header), may))
        return opened[-1]

    monkeypatch.setattr(bench.desk, "open_upload", hold)
    with (
        serving(bench.desk, identities) as plane,
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


def test_an_upload_gives_a_slow_channel_fewer_chunks(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=NUM_VALUES, chunk_bytes=CHUNK)
    bench.set_model()
    payload = random_payload(1, bench.layout)
    open_upload = bench.desk.open_upload
    slow: list[Slow] = []

    def open_slowly(site: str, header: wire.UploadHeader) -> Any:
        reception = open_upload(site, header)
        if slow:
            return reception
        slow.append(Slow(reception, 0.05))
        return slow[0]

    monkeypatch.setattr(bench.desk, "open_upload", open_slowly)
    with (
        serving(bench.desk, identities) as plane,
        dialling(plane.port, identities / "s1", channels=2, chunk_bytes=CHUNK) as link,
    ):
        link.join(bench.hello("s1"))
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
    contribution = bench.contribution("s1")
    assert contribution is not None and read_all(contribution.payload) == read_all(payload)
    bench.intake.forget(0, 0)
    assert 0 < slow[0].num_chunks < NUM_CHUNKS // 3  # half of them without sharing


def test_a_download_relieves_a_slow_channel(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=NUM_VALUES, chunk_bytes=CHUNK)
    bench.set_model()
    payload = random_payload(1, bench.layout)
    bench.publish(1, payload)
    download = bench.desk.download
    slow: list[Slow] = []

    def serve_slowly(site: str, request: wire.DownloadRequest) -> Delivery:
        header, source = download(site, request)
        if slow or source is None:
            return Delivery(header, source)
        slow.append(Slow(source, 0.05))
        inner: Source = slow[0]
        return Delivery(header, inner)

    monkeypatch.setattr(bench.desk, "download", serve_slowly)
    with (
        serving(bench.desk, identities) as plane,
        dialling(plane.port, identities / "s1", channels=3) as link,
    ):
        link.join(bench.hello("s1"))
        delivery = link.download(update_request())
        assert delivery.payload is not None and read_all(delivery.payload) == read_all(payload)
        # What was asked for twice is no more than what was under way when the call was ended.
        assert link.bytes_down < 1.3 * payload.num_bytes
    assert 0 < slow[0].num_chunks < NUM_CHUNKS // 6  # a third of them without help
