"""Transfers go one after the other, and their chunks each once, to whoever asks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedwan.codecs.payload import Bytes
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.transfers import ChunkQueue, SharedQueues, TransferQueue
from tests.planes import (
    Bench,
    dialling,
    eventually,
    header_of,
    in_thread,
    joined,
    random_payload,
    read_all,
    serving,
    update_request,
)


def test_transfers_go_in_the_order_of_arrival() -> None:
    queue, seen = TransferQueue(), []
    keys = [object() for _ in range(4)]
    for key in keys:
        queue.enter(key)

    def take(index: int) -> None:
        queue.wait(keys[index], lambda: True)
        seen.append(index)
        queue.end(keys[index])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, (3, 1, 2, 0)))
    assert seen == [0, 1, 2, 3]


def test_a_place_that_several_share_is_free_when_all_have_left() -> None:
    queue = TransferQueue()
    for key in ("a", "a", "b"):
        queue.enter(key)
    queue.leave("a")
    done = threading.Event()

    def wait() -> None:
        queue.wait("b", lambda: True)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done.wait(0.05)
    queue.leave("a")
    assert done.wait(5)
    thread.join()
    queue.leave("a")  # whoever is gone may say so again
    queue.wait("c", lambda: True)  # and who never came does not wait


def test_every_chunk_goes_once_to_any_number_of_threads() -> None:
    queue = ChunkQueue(range(20_000))
    taken: list[list[int]] = []

    def take() -> None:
        taken.append(list(queue))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(chunk for part in taken for chunk in part) == list(range(20_000))


def test_calls_of_one_transfer_share_the_first_one_s_chunks() -> None:
    queues = SharedQueues()
    first, second = queues.join("s1", 5, [1, 2, 3]), queues.join("s1", 5, [1, 2, 3])
    assert [next(first), next(second), next(first)] == [1, 2, 3]
    assert list(second) == []
    assert list(queues.join("s1", 5, [1, 2, 3])) == []  # late


class Paused:
    """A source whose later chunks come when they may."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_bytes, self.checksum = inner.num_bytes, inner.checksum
        self.may = threading.Event()

    def read(self, offset: int, size: int) -> Bytes:
        assert not offset or self.may.wait(20)
        return self._inner.read(offset, size)


def test_uploads_go_one_after_the_other(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=200_000)
    opened, open_upload = [], bench.hub.open_upload

    def note(site: str, header: wire.UploadHeader) -> Any:
        opened.append(header.version)
        return open_upload(site, header)

    monkeypatch.setattr(bench.hub, "open_upload", note)
    payloads = [Paused(random_payload(seed, bench.layout)) for seed in range(3)]
    with joined(bench, identities, channels=2) as link:
        uploads = []
        for version, payload in enumerate(payloads):
            uploads.append(
                in_thread(lambda v=version, p=payload: link.upload(header_of(p, version=v), p))
            )
            time.sleep(0.05)
        eventually(lambda: 0 in opened)
        for version, payload in enumerate(payloads):
            time.sleep(0.1)
            assert set(opened) == set(range(version + 1))
            payload.may.set()
            eventually(lambda v=version: v == 2 or v + 1 in opened)
        for upload in uploads:
            upload()


def test_updates_go_out_one_after_the_other(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_values=2_000_000)
    bench.publish(1, random_payload(1, bench.layout))
    sent: list[int] = []
    calls = iter(range(10))
    fetch = bench.hub.download

    class Noted:
        def __init__(self, inner: Any) -> None:
            self._inner, self._call = inner, next(calls)
            self.num_bytes = inner.num_bytes

        def read(self, offset: int, size: int) -> Bytes:
            sent.append(self._call)
            return self._inner.read(offset, size)

    def noting(site: str, request: wire.DownloadRequest) -> Delivery:
        header, payload = fetch(site, request)
        return Delivery(header, Noted(payload))  # type: ignore[arg-type]

    monkeypatch.setattr(bench.hub, "download", noting)
    with joined(bench, identities, channels=1) as link:
        downloads = [in_thread(lambda: link.download(update_request())) for _ in range(4)]
        bodies = {read_all(download(20).payload) for download in downloads}
    assert len(bodies) == 1 and set(sent) == {0, 1, 2, 3}
    changes = sum(a != b for a, b in zip(sent, sent[1:], strict=False))
    assert changes == 3


def test_a_download_that_is_cut_off_gives_up_its_place(tmp_path: Path, identities: Path) -> None:
    """Its call takes one chunk and then nothing; another site process must not wait for it."""
    from tests.planes import stub_of

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
