"""A site's end of the data plane: mutual TLS gRPC, striped, resumable, patient."""

# ruff: noqa: D102 (methods are those of `fedwan.link.base.Link`)

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import grpc

from fedwan.codecs.payload import Source
from fedwan.config import LinkConfig
from fedwan.errors import IdentityError, JoinRefused, NotJoined, SiteDrained, SiteEjected
from fedwan.link import wire_pb2 as wire
from fedwan.link.admission import Renewable
from fedwan.link.base import Delivery, Signals
from fedwan.link.framing import Packing
from fedwan.link.rpc import FINAL, OPTIONS, ByteCounter, Patience, Stub, messages, watch
from fedwan.link.tcp import Congestion
from fedwan.link.tls import Identity, handshake_complaint, now
from fedwan.link.transfers import Direction, download, upload

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 19
"""Of payload in one message."""
HEARTBEAT_S = 2.0
LEAVE_PATIENCE_S = 5.0
"""How long a site tries to say farewell."""
REDIAL_S = 0.5
HANDSHAKE_MS = 4_000
"""How long one may take, with TCP's; gRPC's own limit is 20 s. TCP asks at 0, 1, 3 and 7 s: a new
dial asks sooner than the last of these."""


def dial(address: str, identity: Identity) -> grpc.Channel:
    """A channel with a TCP connection of its own, which is made when it is first needed."""
    options = [
        *OPTIONS,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),  # as the front door: the environment's is not for this
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.min_reconnect_backoff_ms", HANDSHAKE_MS),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
    return grpc.secure_channel(address, identity.grpc_channel_credentials(), options=options)


class GrpcLink:
    """Implements `fedwan.link.base.Link`; transfers may run at the same time in several threads.

    `channels` are TCP connections for payloads, beside the one for Control (0: what `Congestion`
    says). `packs` lets a slow link's payloads be packed.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        settings: LinkConfig,
        *,
        channels: int = 0,
        patience_s: float = 300.0,
        packs: bool = True,
    ) -> None:
        self._address = address
        self._renewable = Renewable(identity)
        self._renewing = threading.Lock()
        self._patience_s = patience_s
        self._counter = ByteCounter()
        tcp = Congestion(settings)
        self.num_channels = channels or tcp.num_channels
        self._channels = [dial(address, identity) for _ in range(1 + self.num_channels)]
        self._stubs = [
            Stub(channel, self._counter, address, identity) for channel in self._channels
        ]
        self._stub, *stubs = self._stubs

        def direction(name: str) -> Direction:
            # Threads for two transfers: the next one begins before the last has arrived.
            threads = ThreadPoolExecutor(2 * self.num_channels, thread_name_prefix=name)
            on_connected = partial(tcp.apply_to_peer, address)
            return Direction(stubs, threads, Packing(packs), on_connected)

        # A download must not wait until an upload's stripes have left their threads.
        self._up, self._down = direction("stripe-up"), direction("stripe-down")
        self._control: _ControlStream | None = None
        self._session = ""
        self._has_met = False
        """Whether the coordinator has ever answered."""
        self.signals: Signals = SimpleQueue()

    @property
    def bytes_up(self) -> int:
        return self._counter.up

    @property
    def bytes_down(self) -> int:
        return self._counter.down

    def _renew(self) -> bool:
        """Whether the identity was renewed, so that calls go over new channels from now on.

        Those under way end on the channels that they began on, which stay open until the next time.
        """
        with self._renewing:
            if not self._renewable.renew():
                return False
            identity = self._renewable.identity
            for stub in self._stubs:
                self._channels.append(dial(self._address, identity))
                stub.connect(self._channels[-1], identity)
            while len(self._channels) > 2 * len(self._stubs):
                self._channels.pop(0).close()
            return True

    def join(self, hello: wire.Hello) -> wire.Welcome:
        self._renew()
        self._session = hello.session
        welcome: wire.Welcome = self._retrying("Join", hello)
        if welcome.refusal:
            raise JoinRefused(welcome.refusal)
        if welcome.is_waiting:
            return welcome
        if self._control is not None:
            self._control.close()
        self._control = _ControlStream(self._stub, hello.session, self._renew)
        self.signals = self._control.signals
        return welcome

    def heartbeat(self, step: int) -> None:
        if self._control is not None:
            self._control.step = step

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        header.session = self._session
        header.chunk_bytes = CHUNK_BYTES
        header.num_bytes = payload.num_bytes
        return upload(self._up, self._patience(), header, payload)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        return download(self._down, self._patience(), request)

    def report(self, report: wire.QualityReport) -> None:
        self._retrying("Report", report)

    def unmask(self, answer: wire.Unmasked) -> None:
        self._retrying("Unmask", answer)

    def leave(self, farewell: wire.Farewell) -> None:
        farewell.session = self._session
        # A courtesy: a coordinator that has gone already is not worth a long wait.
        self._retrying("Leave", farewell, min(self._patience_s, LEAVE_PATIENCE_S))

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        for direction in (self._up, self._down):
            direction.threads.shutdown(wait=False, cancel_futures=True)
        for channel in self._channels:
            channel.close()

    def _retrying(self, name: str, message: Any, timeout_s: float | None = None) -> Any:
        patience = self._patience(timeout_s)
        while True:
            try:
                with watch(self._address) as watched:
                    call = getattr(self._stub, name)  # another one once the identity is renewed
                    answer = watched.result(call.future(message, timeout=timeout_s))
                self._has_met = True
                return answer
            except grpc.RpcError as error:
                patience.failed(error)

    def _patience(self, most_s: float | None = None) -> Patience:
        patience_s = self._patience_s if most_s is None else most_s

        def diagnose() -> str | None:
            if self._renew():  # while the coordinator was away
                return None
            identity = self._renewable.identity
            complaint = handshake_complaint(self._address, identity)
            # Anybody on the path can send an alert, or show another certificate. Once the
            # coordinator has answered, only the end of our own certificate is final.
            if complaint and (not self._has_met or identity.expires < now()):
                raise IdentityError(complaint) from None
            return complaint

        return Patience(self._address, patience_s, diagnose)


class _ControlStream:
    """A thread that keeps a Control stream open until `close`, redialling when it breaks.

    Heartbeats go out and signals come in on a channel that carries nothing bulky, so that none
    waits for a payload. `renew`, asked with each heartbeat and before each dial, says whether to
    redial with another identity.
    """

    def __init__(self, stub: Stub, session: str, renew: Callable[[], bool]) -> None:
        self.signals: Signals = SimpleQueue()
        self._renew = renew
        self.step = 0
        self._stub = stub
        self._session = session
        self._closing = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="control")
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._renew()
            try:
                self._call = self._stub.Control(self._heartbeats())
                if self._closing.is_set():  # `close` came before there was a call to cancel
                    self._call.cancel()
                for signal in messages(self._stub.address, self._call):
                    if signal.kind != wire.CoordinatorSignal.HEARTBEAT:
                        self.signals.put(signal)
            except grpc.RpcError as error:
                if self._closing.is_set():
                    return
                if error.code() in FINAL:
                    if not issubclass(kind := FINAL[error.code()], SiteDrained | SiteEjected):
                        of = wire.CoordinatorSignal
                        lost = of.NOT_JOINED if kind is NotJoined else of.GONE
                        self.signals.put(of(kind=lost, text=str(error.details())))
                    return  # the next call tells who was drained or ejected
                log.debug("control stream broke: %s", error)
            self._closing.wait(REDIAL_S)

    def _heartbeats(self) -> Iterator[wire.SiteSignal]:
        while not self._closing.is_set():
            yield wire.SiteSignal(session=self._session, step=self.step)
            self._closing.wait(HEARTBEAT_S)
            if self._renew() and self._call is not None:
                self._call.cancel()
                return
