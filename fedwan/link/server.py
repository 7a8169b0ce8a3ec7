"""The data plane's server: mutual TLS gRPC in front of a hub.

A site's name is the common name of its certificate, never a field of a message. Bytes are
checksummed chunk by chunk, and nothing received is unpickled or executed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from queue import Empty
from typing import Any, NoReturn, TypeVar

import grpc
from cryptography import x509

from fedwan.errors import ConfigError, FedwanError, PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Hub, Signals
from fedwan.link.channels import num_channels, window_options
from fedwan.link.framing import Part, is_intact, make_chunk
from fedwan.link.measured_payload import Discard, noise_delivery
from fedwan.link.methods import handlers
from fedwan.link.packing import PackedOnce, pack, unpack
from fedwan.link.scheduler import SharedQueues, TransferQueue
from fedwan.link.tcp import Congestion
from fedwan.link.tls import Identity

__all__ = ["MAX_MESSAGE_BYTES", "DataPlane"]

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 32 << 20
STOP_S = 5.0
"""How long calls may take to notice that they were cancelled."""
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a port shared with a stranger
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


class DataPlane:
    """Serves a hub over mutual TLS.

    Args:
        hub: the coordinator.
        identity: the coordinator's certificate, key and authority.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        num_threads: calls served at once; every stripe, every waiting download and every Control
            stream holds one.
        heartbeat_s: seconds between heartbeats.
        congestion: control of the sites' connections: `auto`, `bbr`, `cubic` or `system`.
        pace_mbit: most that those of one site may carry down together, Mbit/s with all headers; 0
            sets no limit.
        num_sites: how many share the memory for what arrives.
        channels: of each site; 0 as its own default, by a kernel that is taken to be like this one.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(
        self,
        hub: Hub,
        identity: Identity,
        host: str,
        port: int,
        num_threads: int,
        heartbeat_s: float,
        congestion: str = "auto",
        pace_mbit: float = 0.0,
        num_sites: int = 1,
        channels: int = 0,
    ) -> None:
        self._hub = hub
        self._revocations = identity.revocations()
        self._heartbeat_s = heartbeat_s
        self._chunk_queues = SharedQueues()
        self._packed = PackedOnce()
        self._update_queues: dict[str, TransferQueue] = {}
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="data-plane")
        self._congestion = Congestion(congestion)
        channels = num_channels(channels, self._congestion.is_bbr, bool(pace_mbit))
        self._congestion.pace_mbit = pace_mbit / channels
        options = [*SERVER_OPTIONS, *window_options(num_sites, channels)]
        self._server = grpc.server(self._pool, options=options)
        self._server.add_generic_rpc_handlers((handlers(self),))
        try:
            self.port = self._server.add_secure_port(
                f"{host}:{port}", identity.grpc_server_credentials()
            )
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise ConfigError(
                f"the data plane cannot listen on {host}:{port}, it is in use or not an address "
                "of this machine; set link.listen"
            )

    def start(self) -> None:
        """Begin to serve."""
        # What is accepted inherits it.
        self._congestion.apply_to_listener(self.port)
        self._server.start()

    def stop(self, grace_s: float = 2.0) -> None:
        """Refuse new calls, give those in flight `grace_s` seconds, and close the port."""
        if not self._server.stop(grace_s).wait(grace_s + STOP_S):
            log.warning("the data plane's calls did not end %g s after they were cancelled", STOP_S)
        self._pool.shutdown(wait=False)  # gRPC leaves the threads of a pool that it was given

    # Calls ---------------------------------------------------------------------------------

    def Join(self, request: wire.Hello, context: Any) -> wire.Welcome:  # noqa: N802, D102
        return _guard(context, lambda: self._hub.join(self._site(context), request))

    def Control(  # noqa: N802, D102
        self, requests: Iterator[wire.SiteSignal], context: Any
    ) -> Iterator[wire.CoordinatorSignal]:
        site = self._site(context)
        first = next(requests, None)
        if first is None:
            return
        signals = _guard(context, lambda: self._hub.attach(site, first.session))
        reader = threading.Thread(target=self._listen, args=(site, requests), daemon=True)
        context.add_callback(lambda: self._hub.detach(site, first.session))
        reader.start()
        yield from self._speak(signals, context)

    def _listen(self, site: str, requests: Iterator[wire.SiteSignal]) -> None:
        try:
            for signal in requests:
                self._hub.heard(site, signal)
        except (grpc.RpcError, ValueError):
            pass  # The stream broke; the callback above tells the hub.
        except Exception as error:  # grpc raises a bare Exception when a stream is torn down
            log.debug("control stream of %s: %s", site, error)

    def _speak(self, signals: Signals, context: Any) -> Iterator[wire.CoordinatorSignal]:
        while context.is_active():
            try:
                yield signals.get(timeout=self._heartbeat_s)
            except Empty:
                yield wire.CoordinatorSignal(kind=wire.CoordinatorSignal.HEARTBEAT)

    def Upload(  # noqa: N802, D102
        self, requests: Iterator[Part[wire.UploadHeader]], context: Any
    ) -> wire.Receipt:
        return _guard(context, lambda: self._receive(self._site(context), requests))

    def _receive(self, site: str, parts: Iterator[Part[wire.UploadHeader]]) -> wire.Receipt:
        first = next(parts, None)
        if first is None or first.header is None:
            raise PayloadError("an upload began without its header; refused")
        is_measurement = first.header.kind == wire.UploadHeader.MEASUREMENT
        reception = Discard() if is_measurement else self._hub.open_upload(site, first.header)
        if isinstance(reception, wire.Receipt):
            return reception
        most_bytes = min(first.header.chunk_bytes, MAX_MESSAGE_BYTES)
        part: Part[wire.UploadHeader] | None = first
        while part is not None:
            if part.chunk is not None:
                if not is_intact(part.chunk):
                    raise PayloadError(f"chunk at {part.chunk.offset} was damaged on the way")
                reception.write(part.chunk.offset, unpack(part.chunk, most_bytes))
            part = next(parts, None)
        if is_measurement:
            return wire.Receipt(status=wire.Receipt.ACCEPTED)
        return self._hub.close_stripe(site, first.header)

    def Download(  # noqa: N802, D102
        self, request: wire.DownloadRequest, context: Any
    ) -> Iterator[Part[wire.DownloadHeader]]:
        site = self._site(context)
        delivery = _guard(context, lambda: self._fetch(site, request))
        parts = _send(
            delivery,
            request,
            lambda chunks: self._share(site, request, chunks, context),
            self._packed,
        )
        while (part := _guard(context, lambda: next(parts, None))) is not None:
            yield part

    def _fetch(self, site: str, request: wire.DownloadRequest) -> Delivery:
        if request.kind == wire.DownloadRequest.MEASUREMENT:
            return noise_delivery(request, self._congestion.in_use)
        return self._hub.download(site, request)

    def _share(
        self, site: str, request: wire.DownloadRequest, chunks: Iterable[int], context: Any
    ) -> Iterable[int]:
        """A call's share of the chunks; updates of one site go out one after the other."""
        if not request.transfer:
            return chunks
        shared = self._chunk_queues.join(site, request.transfer, chunks)
        if request.kind != wire.DownloadRequest.UPDATE:
            return shared
        queue, key = self._update_queues.setdefault(site, TransferQueue()), request.transfer
        queue.enter(key)
        if not context.add_callback(lambda: queue.leave(key)):
            queue.leave(key)  # the call is over already
        queue.wait(key, lambda: context.is_active() and not shared.is_empty)
        return queue.following(key, shared)

    def Report(self, request: wire.QualityReport, context: Any) -> wire.Ack:  # noqa: N802, D102
        _guard(context, lambda: self._hub.report(self._site(context), request))
        return wire.Ack()

    def Leave(self, request: wire.Farewell, context: Any) -> wire.Ack:  # noqa: N802, D102
        _guard(context, lambda: self._hub.leave(self._site(context), request))
        return wire.Ack()

    def _site(self, context: Any) -> str:
        """The name in the peer's certificate, which TLS has verified."""
        auth = context.auth_context()
        names = auth.get("x509_common_name", [])
        if len(names) != 1:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate has no common name")
        name: str = names[0].decode()
        pem = auth.get("x509_pem_cert", [b""])[0]
        if self._revocations.is_revoked(_serial(pem)):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the certificate of {name} is revoked; have a new one issued",
            )
        return name


@lru_cache(maxsize=4096)
def _serial(pem: bytes) -> int:
    return x509.load_pem_x509_certificate(pem).serial_number


def _send(
    delivery: Delivery,
    request: wire.DownloadRequest,
    share: Callable[[Iterable[int]], Iterable[int]],
    packed: PackedOnce,
) -> Iterator[Part[wire.DownloadHeader]]:
    header, payload = delivery
    if payload is None or (request.checksum and request.checksum != header.checksum):
        # A transfer that resumes must go on with the same bytes; otherwise the site asks anew.
        if payload is not None:
            header = wire.DownloadHeader(
                status=wire.DownloadHeader.SUPERSEDED, version=header.version
            )
        yield Part(header, None)
        return
    size = header.chunk_bytes
    num_chunks = -(-payload.num_bytes // size)
    if len(request.chunks) > num_chunks:
        raise PayloadError(f"{len(request.chunks)} chunks asked for where there are {num_chunks}")
    chunks = share(request.chunks or range(num_chunks))
    shown: wire.DownloadHeader | None = header
    for index in chunks:
        offset = index * size
        length = min(size, payload.num_bytes - offset)
        if length > 0:
            read = partial(payload.read, offset, length)
            if not request.packed:
                chunk = make_chunk(offset, read())
            elif request.kind == wire.DownloadRequest.UPDATE:  # other sites fetch the same
                chunk = packed.chunk(header.checksum, offset, read)
            else:
                chunk = pack(offset, read())
            yield Part(shown, chunk)
            shown = None
    if shown is not None:
        yield Part(shown, None)


def _guard(context: Any, call: Callable[[], T]) -> T:
    """Run a hub's call; turn our errors into statuses whose text the site shows as it is."""
    try:
        return call()
    except PayloadError as error:
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
    except FedwanError as error:
        _abort(context, grpc.StatusCode.FAILED_PRECONDITION, error)
    except OSError as error:
        _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error)


def _abort(context: Any, code: grpc.StatusCode, error: Exception) -> NoReturn:
    context.abort(code, str(error))
    raise AssertionError("abort returns never")
