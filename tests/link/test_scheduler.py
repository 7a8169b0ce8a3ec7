"""Transfers go one after the other, and their chunks each once, to whoever asks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedwan.link import wire_pb2 as wire
from tests.planes import (
    Bench,
    dialling,
    eventually,
    header_of,
    in_thread,
    joined,
    random_payload,
    serving,
    stub_of,
    update_request,
)


def test_uploads_go_one_after_the_other(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=200_000)
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
    bench.publish(1, random_payload(1, bench.layout))
    with (
        serving(bench.hub, identities) as plane,
        stub_of(plane.port, identities / "s1") as stub,
        dialling(plane.port, identities / "s1", channels=1) as link,
    ):
        link.join(bench.hello("s1"))
        stuck_request = update_request()
        stuck_request.transfer = 7
        stuck = stub.Download(stuck_request)
        next(stuck)
        download = in_thread(lambda: link.download(update_request()))
        time.sleep(0.2)
        stuck.cancel()
        assert download(20).payload is not None
