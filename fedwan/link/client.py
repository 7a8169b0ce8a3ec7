"""A site's end of the data plane: mutual TLS gRPC, striped, resumable, patient."""

# ruff: noqa: D102 (methods are those of `fedwan.link.base.Link`)

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import grpc

from fedwan.codecs.payload import Source
from fedwan.errors import JoinRefused
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Signals
from fedwan.link.byte_counter import ByteCounter
from fedwan.link.channels import ChannelPool, Direction, num_channels
from fedwan.link.control import ControlStream
from fedwan.link.download import download
from fedwan.link.handshake import handshake_complaint
from fedwan.link.methods import Stub
from fedwan.link.packing import Packing
from fedwan.link.retry import Patience
from fedwan.link.server import MAX_MESSAGE_BYTES
from fedwan.link.tcp import Congestion
from fedwan.link.tls import Identity
from fedwan.link.upload import upload

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
        channels: TCP connections for payloads, beside the one for Control; 0 takes 4, or 1 under
            bbr or a pace.
        chunk_bytes: bytes of payload in one message.
        heartbeat_s: seconds between heartbeats.
        patience_s: how long to keep trying while nothing comes through.
        congestion: control of those connections: `auto`, `bbr`, `cubic` or `system`.
        compression: of their chunks: `auto`, `zstd` or `none`.
        pace_mbit: most that they may carry up together, Mbit/s with all headers; 0 sets no limit.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        channels: int = 0,
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
        self._stub = Stub(self._channel)
        self._counter = ByteCounter()
        tcp = Congestion(congestion)
        self.num_channels = num_channels(channels, tcp.is_bbr, bool(pace_mbit))
        """For payloads."""
        tcp.pace_mbit = pace_mbit / self.num_channels
        self._pool = ChannelPool(self._dial, self.num_channels)

        def direction(name: str) -> Direction:
            # Threads for two transfers: the next one begins before the last has arrived.
            threads = ThreadPoolExecutor(2 * self.num_channels, thread_name_prefix=name)
            on_connected = partial(tcp.apply_to_peer, address)
            return Direction(self._pool, threads, Packing(compression), self._counter, on_connected)

        # A download must not wait until an upload's stripes have left their threads.
        self._up, self._down = direction("stripe-up"), direction("stripe-down")
        self._control: ControlStream | None = None
        self._session = ""

    def _dial(self) -> grpc.Channel:
        return grpc.secure_channel(self._address, self._credentials, options=CLIENT_OPTIONS)

    @property
    def signals(self) -> Signals:
        assert self._control is not None, "join first"
        return self._control.signals

    @property
    def bytes_up(self) -> int:
        return self._counter.up

    @property
    def bytes_down(self) -> int:
        return self._counter.down

    def join(self, hello: wire.Hello) -> wire.Welcome:
        self._session = hello.session
        welcome: wire.Welcome = self._retrying(
            lambda: self._counter.received(self._stub.Join(self._counter.sent(hello)))
        )
        if welcome.refusal:
            raise JoinRefused(welcome.refusal)
        if welcome.is_waiting:
            return welcome
        if self._control is not None:
            self._control.close()
        self._control = ControlStream(self._stub, hello.session, self._heartbeat_s, self._counter)
        return welcome

    def heartbeat(self, step: int) -> None:
        if self._control is not None:
            self._control.step = step

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        header.session = self._session
        header.chunk_bytes = self._chunk_bytes
        header.num_bytes = payload.num_bytes
        return upload(self._up, self._patience(), header, payload)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        return download(self._down, self._patience(), request)

    def report(self, report: wire.QualityReport) -> None:
        self._retrying(
            lambda: self._counter.received(self._stub.Report(self._counter.sent(report)))
        )

    def leave(self, farewell: wire.Farewell) -> None:
        farewell.session = self._session
        # A courtesy: a coordinator that has gone already is not worth a long wait.
        self._retrying(
            lambda: self._counter.received(self._stub.Leave(self._counter.sent(farewell))),
            min(self._patience_s, LEAVE_PATIENCE_S),
        )

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        for direction in (self._up, self._down):
            direction.threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
        self._channel.close()

    def _retrying(self, call: Callable[[], T], patience_s: float | None = None) -> T:
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
