"""A link within one process: the site calls the coordinator's hub directly.

Payloads are copied: what a site does to its tensors afterwards cannot reach the coordinator.
"""

# ruff: noqa: D102 (methods are those of `fedwan.link.base.Link`)

from __future__ import annotations

from queue import SimpleQueue

from fedwan.codecs.payload import Source
from fedwan.errors import JoinRefused
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Hub, Signals
from fedwan.link.buffer import Buffer


class LoopbackLink:
    """The site's end of a link to a hub in the same process; nothing proves its name here."""

    def __init__(self, hub: Hub, site: str, chunk_bytes: int = 1 << 20) -> None:
        self._hub = hub
        self._site = site
        self._chunk_bytes = chunk_bytes
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
        header.chunk_bytes = self._chunk_bytes
        header.session = self._session
        reception = self._hub.open_upload(self._site, header)
        if isinstance(reception, wire.Receipt):
            return reception
        for offset in range(0, payload.num_bytes, self._chunk_bytes):
            size = min(self._chunk_bytes, payload.num_bytes - offset)
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

    def leave(self, farewell: wire.Farewell) -> None:
        farewell.session = self._session
        self._hub.leave(self._site, farewell)

    def close(self) -> None:
        self._hub.detach(self._site, self._session)
