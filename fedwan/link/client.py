"""A site's end of the data plane: mutual TLS gRPC, striped, resumable, patient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc

from fedwan.codecs.payload import Source
from fedwan.errors import JoinRefused
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Signals
from fedwan.link.congestion import Congestion
from fedwan.link.control import ControlStream
from fedwan.link.download import download
from fedwan.link.handshake import handshake_complaint
from fedwan.link.lanes import Lanes, Trunk
from fedwan.link.methods import Stub
from fedwan.link.packing import Packing
from fedwan.link.retry import Patience
from fedwan.link.server import MAX_MESSAGE_BYTES
from fedwan.link.stripes import PACED_CHANNELS, Stripes, most_stripes
from fedwan.link.tls import Identity
from fedwan.link.upload import upload
from fedwan.link.wiretap import ByteCounter

__all__ = ["GrpcLink"]

T = TypeVar("T")

LEAVE_PATIENCE_S = 5.0
"""How long a site tries to say farewell."""

CLIENT_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # each channel its own TCP connection
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]

CHUNK_BYTES = 1 << 20
"""Of payload in one message."""
HEARTBEAT_S = 2.0
"""Seconds between heartbeats."""


class GrpcLink:
    """Implements `fedwan.link.base.Link`; transfers may run at the same time in several threads.

    Memory: an upload copies one chunk per stripe at a time; a download holds one copy of its
    payload.

    Args:
        address: `host:port` of the coordinator's data plane.
        identity: this site's certificate, key and authority.
        channels: TCP connections for payloads, beside the one for Control; 0 finds out how many
            are best, see `fedwan.link.stripes`.
        chunk_bytes: bytes of payload in one message.
        heartbeat_s: seconds between heartbeats.
        patience_s: how long to keep trying while nothing comes through.
        congestion: control of those connections, see `fedwan.link.congestion`.
        compression: of their chunks, see `fedwan.link.packing`.
        pace_mbit: most that they may carry up together, Mbit/s with all headers; 0 sets no limit,
            and any other is for one connection, if `channels` does not say how many.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        channels: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        heartbeat_s: float = HEARTBEAT_S,
        patience_s: float = 300.0,
        congestion: str = "auto",
        compression: str = "auto",
        pace_mbit: float = 0.0,
    ) -> None:
        self._address = address
        self._identity = identity
        self._chunk_bytes = chunk_bytes
        self._heartbeat_s = heartbeat_s
        self._patience_s = patience_s
        self._credentials = identity.grpc_channel_credentials()
        self._channel = self._dial()
        self._words = Stub(self._channel)
        self._counter = ByteCounter()
        self._trunk = Trunk(self._dial)
        if pace_mbit:
            channels = channels or PACED_CHANNELS
        choice = Congestion(congestion, pace_mbit / max(1, channels))

        def lanes(name: str) -> Lanes:
            return Lanes(
                self._trunk,
                Stripes(channels, choice.yields_to_loss),
                Packing(compression),
                self._counter,
                lambda: choice.apply_to_peer(address),
                most_stripes(channels),
                name,
            )

        # A download must not wait until an upload's stripes have left their threads.
        self.up, self.down = lanes("stripe-up"), lanes("stripe-down")
        self._control: ControlStream | None = None
        self._session = ""

    def _dial(self) -> grpc.Channel:
        return grpc.secure_channel(self._address, self._credentials, options=CLIENT_OPTIONS)

    @property
    def signals(self) -> Signals:
        """See `Link`."""
        assert self._control is not None, "join first"
        return self._control.signals

    @property
    def bytes_up(self) -> int:
        """See `Link`."""
        return self._counter.up

    @property
    def bytes_down(self) -> int:
        """See `Link`."""
        return self._counter.down

    def join(self, hello: wire.Hello) -> wire.Welcome:
        """See `Link`."""
        self._session = hello.session
        welcome: wire.Welcome = self._patiently(
            lambda: self._counter.received(self._words.Join(self._counter.sent(hello)))
        )
        if welcome.refusal:
            raise JoinRefused(welcome.refusal)
        if self._control is not None:
            self._control.close()
        self._control = ControlStream(self._words, hello.session, self._heartbeat_s, self._counter)
        return welcome

    def heartbeat(self, step: int) -> None:
        """See `Link`."""
        if self._control is not None:
            self._control.step = step

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        """See `Link`."""
        header.session = self._session
        header.chunk_bytes = self._chunk_bytes
        header.num_bytes = payload.num_bytes
        return upload(self.up, self._patience(), header, payload)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        """See `Link`."""
        return download(self.down, self._patience(), request)

    def report(self, report: wire.QualityReport) -> None:
        """See `Link`."""
        self._patiently(
            lambda: self._counter.received(self._words.Report(self._counter.sent(report)))
        )

    def leave(self, farewell: wire.Farewell) -> None:
        """See `Link`."""
        farewell.session = self._session
        # A courtesy: a coordinator that has gone already is not worth a long wait.
        self._patiently(
            lambda: self._counter.received(self._words.Leave(self._counter.sent(farewell))),
            min(self._patience_s, LEAVE_PATIENCE_S),
        )

    def close(self) -> None:
        """See `Link`."""
        if self._control is not None:
            self._control.close()
        self.up.close()
        self.down.close()
        self._trunk.close()
        self._channel.close()

    def _patiently(self, call: Callable[[], T], patience_s: float | None = None) -> T:
        patience = self._patience(patience_s)
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                patience.failed(error)

    def _patience(self, patience_s: float | None = None) -> Patience:
        return Patience(
            self._address,
            self._patience_s if patience_s is None else patience_s,
            lambda: handshake_complaint(self._address, self._identity),
        )
