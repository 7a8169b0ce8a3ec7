"""Links within a process: one calls the hub itself, one is as slow as a link of the wide area."""

# ruff: noqa: D102 (methods are those of `fedwan.link.base.Link`)

from __future__ import annotations

import math
import threading
import time
from queue import SimpleQueue
from typing import Any

from fedwan.codecs.payload import Source
from fedwan.errors import JoinRefused
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Hub, Link, Signals
from fedwan.link.buffer import Buffer

CHUNK_BYTES = 1 << 20


class LoopbackLink:
    """Calls a hub in the same process; nothing proves the site's name here.

    Payloads are copied: what a site does to its tensors afterwards cannot reach the coordinator.
    """

    def __init__(self, hub: Hub, site: str) -> None:
        self._hub = hub
        self._site = site
        self._session = ""
        self.signals: Signals = SimpleQueue()
        self.bytes_up = 0
        self.bytes_down = 0

    def join(self, hello: wire.Hello) -> wire.Welcome:
        welcome = self._hub.join(self._site, hello)
        if welcome.refusal:
            raise JoinRefused(welcome.refusal)
        if welcome.is_waiting:
            return welcome
        self._session = hello.session
        self.signals = self._hub.attach(self._site, hello.session)
        return welcome

    def heartbeat(self, step: int) -> None:
        self._hub.heard(self._site, wire.SiteSignal(session=self._session, step=step))

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        header.session = self._session
        header.chunk_bytes, header.num_bytes = CHUNK_BYTES, payload.num_bytes
        reception = self._hub.open_upload(self._site, header)
        if isinstance(reception, wire.Receipt):
            return reception
        for offset in range(0, payload.num_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, payload.num_bytes - offset)
            reception.write(offset, payload.read(offset, size))
        self.bytes_up += payload.num_bytes
        return self._hub.close_stripe(self._site, header)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        header, payload = self._hub.download(self._site, request)
        if payload is None:
            return Delivery(header, None)
        self.bytes_down += payload.num_bytes
        copy = Buffer(payload.num_bytes)
        copy.write(0, payload.read(0, payload.num_bytes))
        return Delivery(header, copy)

    def report(self, report: wire.QualityReport) -> None:
        self._hub.report(self._site, report)

    def unmask(self, answer: wire.Unmasked) -> None:
        self._hub.unmask(self._site, answer)

    def leave(self, farewell: wire.Farewell) -> None:
        farewell.session = self._session
        self._hub.leave(self._site, farewell)

    def close(self) -> None:
        self._hub.detach(self._site, self._session)


class ShapedLink:
    """Wraps a link; `rate_mbit` is that of each direction (0: no limit).

    What calls would have taken on the wide area, one after the other in each direction, is waited
    out after them; of an upload, less what it really took.
    """

    def __init__(self, inner: Link, rate_mbit: float = 0.0, rtt_ms: float = 0.0) -> None:
        self._inner = inner
        self._bytes_per_s = (rate_mbit or math.inf) * 1e6 / 8
        self._rtt_s = rtt_ms / 1e3
        self._lock = threading.Lock()
        self._free_s = {"up": 0.0, "down": 0.0}
        """When the last bytes will have left that are on their way in a direction."""

    def __getattr__(self, name: str) -> Any:  # all else of a `Link`
        return getattr(self._inner, name)

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        began = time.monotonic()
        receipt = self._inner.upload(header, payload)
        self._wait_out("up", payload, began)
        return receipt

    def download(self, request: wire.DownloadRequest) -> Delivery:
        delivery = self._inner.download(request)
        if delivery.payload is not None:
            # What was waited for before the payload existed is no part of its transfer.
            self._wait_out("down", delivery.payload, time.monotonic())
        return delivery

    def _wait_out(self, way: str, payload: Source, began: float) -> None:
        with self._lock:
            left_s = max(began, self._free_s[way]) + payload.num_bytes / self._bytes_per_s
            self._free_s[way] = left_s
        if (remaining := left_s + self._rtt_s - time.monotonic()) > 0:
            time.sleep(remaining)
