"""The data plane's server: mutual TLS gRPC in front of a hub.

A site's name is the common name of its certificate, never a field of a message. Nothing received is
unpickled or executed.
"""

# ruff: noqa: N802 (calls are named as in wire.proto)

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from queue import Empty
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import Any
from urllib.parse import unquote

import grpc
import torch
from cryptography import x509
from google.protobuf.message import DecodeError

from fedwan.codecs.payload import Bytes
from fedwan.config import Config
from fedwan.errors import ConfigError, FedwanError, PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.admission import Admission, Lapse, Renewable, refusal
from fedwan.link.base import Delivery, Hub, Proof
from fedwan.link.certificates import COORDINATOR
from fedwan.link.client import HEARTBEAT_S
from fedwan.link.framing import Chunk, PackedOnce, Part, pack, unpack
from fedwan.link.rpc import (
    MAX_MESSAGE_BYTES,
    METHODS,
    MOST_BYTES,
    OPTIONS,
    SERVICE,
    Method,
    code_of,
    messages,
    threads_per_site,
    watch,
    window_options,
)
from fedwan.link.tcp import Congestion, num_accepted
from fedwan.link.tls import Identity, now
from fedwan.link.transfers import TransferQueue

log = logging.getLogger(__name__)

SPARE_THREADS = 8
WAITING_CALLS = 1024
"""That may wait for a thread; gRPC answers others RESOURCE_EXHAUSTED."""
STOP_S = 5.0
"""How long calls may take to notice that they were cancelled."""
HANDSHAKE_MS = 10_000
"""Within which a connection that was accepted must have shown a certificate."""
SILENT_CONNECTIONS = 2_000
"""Besides the sites' own: 45 kB each in gRPC until the handshake is over, or has taken too long."""
PEERS_S = 2.0
"""Between two looks at the certificates of calls under way, and at the crowd."""
MAX_NOISE_BYTES = 256 << 20
"""Of one measurement, which bounds the site's memory."""
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 22


class DataPlane:
    """Serves a hub over mutual TLS; port 0 takes a free one, a port in use is a `ConfigError`.

    Each of the run's sites may have so many calls under way, a thread each, and no more: every
    stripe, waiting download and Control stream is one. They share the memory for what arrives, too.
    `link.pace_mbit` is what the connections of one site may carry down together (0: no limit); the
    sites' kernels are taken to be like ours.
    """

    def __init__(self, hub: Hub, identity: Identity, config: Config, port: int = 0) -> None:
        self._hub = hub
        self._admission = Admission(identity.folder)
        self._calls: dict[Any, tuple[str, x509.Certificate]] = {}
        """Those under way, each with its site and the certificate that it came with."""
        self._most_calls = threads_per_site(config.stream.fragments)
        self._stopping = threading.Event()
        self._packed = PackedOnce()
        self._queues: dict[tuple[str, int], TransferQueue] = {}
        """Of what each site downloads, by kind."""
        # Torch keeps this number by thread. Of many calls that check payloads at once, each with a
        # team of threads, most wait for their teams.
        self._num_threads = num_threads = config.num_sites * self._most_calls + SPARE_THREADS
        self._pool = ThreadPoolExecutor(num_threads, "data-plane", torch.set_num_threads, (1,))
        self._most_connections = _most_connections(num_threads)
        link = config.link
        self._congestion = Congestion(link)
        options = [
            *OPTIONS,
            ("grpc.so_reuseport", 0),  # a port in use is an error, not one shared with a stranger
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_concurrent_streams", self._most_calls),  # of one connection
            ("grpc.max_allowed_incoming_connections", self._most_connections),
            *window_options(config.num_sites, self._congestion.num_channels),
        ]
        self._server = grpc.server(
            self._pool, options=options, maximum_concurrent_rpcs=num_threads + WAITING_CALLS
        )
        calls = {name: self._handler(name, method) for name, method in METHODS.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, calls),)
        )
        self.identity = Renewable(identity)
        """As its folder has it now."""
        self._expired: Identity | None = None
        """That which was told to have expired: sites that are connected may go on for days."""
        credentials = self.identity.grpc_server_credentials()
        address = f"{link.listen.rpartition(':')[0]}:{port}" if port else link.listen
        try:
            self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ConfigError(
                f"the data plane cannot listen on {address}, it is in use or not an address "
                "of this machine; set link.listen"
            ) from None

    def start(self) -> None:
        """Begin to serve."""
        self._congestion.apply_to_listener(self.port)  # what is accepted inherits it
        self._server.start()
        threading.Thread(target=self._watch_peers, daemon=True, name="peers").start()

    def stop(self, grace_s: float = 2.0) -> None:
        """Refuse new calls, give those in flight `grace_s` seconds, and close the port."""
        self._stopping.set()
        if not self._server.stop(grace_s).wait(grace_s + STOP_S):
            log.warning("the data plane's calls did not end %g s after they were cancelled", STOP_S)
        self._pool.shutdown(wait=False)  # gRPC leaves the threads of a pool that it was given

    def _handler(self, name: str, method: Method) -> Any:
        call = getattr(self, f"_{name.lower()}")
        takes, _, gives = method.kind.partition("_")

        def arguments(requests: Iterator[Any], context: Any) -> tuple[str, Any, Any]:
            check, site = partial(_refuse_garbage, context), self._site(context)
            if takes == "stream":  # of Control, heartbeats come all the time
                return site, map(check, messages(_peer(context), context, requests)), context
            with watch(_peer(context), context):
                return site, check(next(requests, False)), context

        def reply(requests: Iterator[Any], context: Any) -> Any:
            with self._answering(context):
                return call(*arguments(requests, context))

        def reply_stream(requests: Iterator[Any], context: Any) -> Iterator[Any]:
            with self._answering(context):
                yield from call(*arguments(requests, context))

        # Each as a stream, which is the same on the wire: a single message gRPC would wait for in
        # our thread before it calls us, and so before the call counts as anybody's, for ever.
        return getattr(grpc, f"stream_{gives}_rpc_method_handler")(
            reply_stream if gives == "stream" else reply,
            request_deserializer=_tolerant(
                method.read_request, MOST_BYTES.get(name, MAX_MESSAGE_BYTES)
            ),
            response_serializer=method.write_reply,
        )

    def _site(self, context: Any) -> str:
        """The name in the peer's certificate, which TLS has verified."""
        names = context.auth_context().get("x509_common_name", [])
        if len(names) != 1:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate has no common name")
        name: str = names[0].decode()
        certificate = _certificate(_certificate_pem(context))
        if why := self._admission.objection(certificate):
            text = refusal(name, why)
            if isinstance(why, Lapse):
                context.abort(grpc.StatusCode.UNAVAILABLE, text)
            self._hub.refuse(name, text)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
        if sum(site == name for site, _ in tuple(self._calls.values())) >= self._most_calls:
            text = f"{name} has {self._most_calls} calls under way, and no more are its share"
            self._hub.refuse(name, text)
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._calls[context] = name, certificate
        return name

    @contextmanager
    def _answering(self, context: Any) -> Iterator[None]:
        """A call has its thread until its handler ends, which may be after it was cancelled.

        Our errors become statuses, whose text the site shows as it is.
        """
        try:
            yield
        except FedwanError as error:
            context.abort(code_of(error), str(error))
        except OSError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            self._calls.pop(context, None)

    def _watch_peers(self) -> None:
        """End the calls of who is no longer served: its next call is told why."""
        while not self._stopping.wait(PEERS_S):
            try:
                for call, (_, certificate) in tuple(self._calls.items()):
                    if self._admission.objection(certificate):
                        call.cancel()
                for text in self._crowd():
                    self._hub.refuse("", text)
            except Exception:  # whatever it is, the next look may do
                log.exception("certificates of calls under way could not be looked at")

    def _crowd(self) -> Iterator[str]:
        """What keeps everybody out, or is about to, and gRPC does not tell."""
        identity = self.identity.identity
        if (
            identity.expires <= now()
            and identity is not self._expired
            and not self.identity.renew()
        ):
            self._expired = identity
            yield (
                f"the coordinator's own certificate expired on "
                f"{identity.expires:%Y-%m-%d %H:%M} UTC, and no site that dials anew "
                f"accepts it; have it renewed at the authority: fedwan pki renew {COORDINATOR}"
            )
        num, most, own = num_accepted(self.port), self._most_connections, self._num_threads
        if num >= most:
            yield f"{most} connections to the data plane stand, and no more are taken"
        elif num > own:
            yield (
                f"more than {own} connections to the data plane stand, which is all that its sites "
                f"need; who shows no certificate within {HANDSHAKE_MS / 1000:g} s is cut off"
            )
        if self._pool._work_queue.qsize() >= WAITING_CALLS:
            yield f"{WAITING_CALLS} calls wait for the data plane, and no more are taken"

    # Calls ---------------------------------------------------------------------------------

    def _join(self, site: str, hello: wire.Hello, context: Any) -> wire.Welcome:
        hello.certificate = _certificate_pem(context)
        return self._hub.join(site, hello)

    def _report(self, site: str, report: wire.QualityReport, context: Any) -> wire.Ack:
        self._hub.report(site, report)
        return wire.Ack()

    def _unmask(self, site: str, answer: wire.Unmasked, context: Any) -> wire.Ack:
        self._hub.unmask(site, answer)
        return wire.Ack()

    def _leave(self, site: str, farewell: wire.Farewell, context: Any) -> wire.Ack:
        self._hub.leave(site, farewell)
        return wire.Ack()

    def _control(
        self, site: str, requests: Iterator[wire.SiteSignal], context: Any
    ) -> Iterator[wire.CoordinatorSignal]:
        first = next(requests, None)
        if first is None:
            return
        signals = self._hub.attach(site, first.session)
        reader = threading.Thread(target=self._listen, args=(site, requests), daemon=True)
        context.add_callback(lambda: self._hub.detach(site, first.session))
        reader.start()
        while context.is_active():
            try:
                yield signals.get(timeout=HEARTBEAT_S)
            except Empty:
                yield wire.CoordinatorSignal(kind=wire.CoordinatorSignal.HEARTBEAT)

    def _listen(self, site: str, requests: Iterator[wire.SiteSignal]) -> None:
        try:
            for signal in requests:
                self._hub.heard(site, signal)
        except Exception as error:  # grpc raises a bare one when a stream is torn down
            log.debug("control stream of %s: %s", site, error)  # the callback tells the hub

    def _upload(
        self, site: str, parts: Iterator[Part[wire.UploadHeader]], context: Any
    ) -> wire.Receipt:
        part = next(parts, None)
        if part is None or part.header is None:
            raise PayloadError("an upload began without its header; refused")
        header, signature = part.header, b""
        header.ClearField("signature")  # it comes last, and is not to be kept
        is_measurement = header.kind == wire.UploadHeader.MEASUREMENT
        reception = None if is_measurement else self._hub.open_upload(site, header)
        if isinstance(reception, wire.Receipt):
            return reception
        most_bytes, noise_bytes = min(header.chunk_bytes, MAX_MESSAGE_BYTES), 0
        is_question = True
        while part is not None:
            if part.chunk is not None:
                is_question = False
                data = unpack(part.chunk, most_bytes)
                if reception is not None:
                    reception.write(part.chunk.offset, data)
                elif (noise_bytes := noise_bytes + len(data)) > MAX_NOISE_BYTES:
                    raise PayloadError(f"a measurement has at most {MAX_NOISE_BYTES} bytes")
            if (part := next(parts, None)) and part.header is not None:
                signature = part.header.signature
        if is_measurement:
            return wire.Receipt(status=wire.Receipt.ACCEPTED)
        is_signed = signature or header.kind != wire.UploadHeader.CONTRIBUTION
        if is_question and reception is not None and not is_signed:
            # Of a process that has not read all that its predecessor has sent: nothing to judge.
            return wire.Receipt(status=wire.Receipt.INCOMPLETE, missing=reception.missing())
        return self._hub.close_stripe(site, header, Proof(_certificate_pem(context), signature))

    def _download(
        self, site: str, request: wire.DownloadRequest, context: Any
    ) -> Iterator[Part[wire.DownloadHeader]]:
        if request.kind == wire.DownloadRequest.MEASUREMENT:
            header, payload = _noise_delivery(request, self._congestion.in_use)
        else:
            header, payload = self._hub.download(site, request)
        if payload is not None and request.checksum not in (0, header.checksum):
            # A transfer that resumes must go on with the same bytes; otherwise the site asks anew.
            status, payload = wire.DownloadHeader.SUPERSEDED, None
            header = wire.DownloadHeader(status=status, version=header.version)
        if payload is None:
            yield Part(header, None)
            return
        size = header.chunk_bytes
        num_chunks = -(-payload.num_bytes // size)
        if len(request.chunks) > num_chunks:
            raise PayloadError(
                f"{len(request.chunks)} chunks asked for where there are {num_chunks}"
            )
        chunks = self._share(site, request, list(request.chunks) or range(num_chunks), context)
        with watch(_peer(context), context) as watched:
            # By itself: the site's other channels begin when it comes, not a chunk later.
            yield Part(header, None)
            for index in chunks:
                watched.still = 0
                offset = index * size
                if offset >= payload.num_bytes:
                    continue
                read = partial(payload.read, offset, min(size, payload.num_bytes - offset))
                if not request.packed:
                    chunk = Chunk(offset, read())
                elif request.kind == wire.DownloadRequest.UPDATE:  # other sites fetch the same
                    chunk = self._packed.chunk(header.checksum, offset, read)
                else:
                    chunk = pack(offset, read())
                yield Part(None, chunk)

    def _share(
        self, site: str, request: wire.DownloadRequest, chunks: Iterable[int], context: Any
    ) -> Iterable[int]:
        """A call's share of the chunks; updates of one site go out one after the other."""
        queue = self._queues.setdefault((site, request.kind), TransferQueue())
        transfer = queue.enter(request.transfer or object(), chunks)
        if not context.add_callback(lambda: queue.leave(transfer)):
            queue.leave(transfer)  # the call is over already
        if request.kind == wire.DownloadRequest.UPDATE:
            queue.wait(transfer, context.is_active)
        return queue.chunks(transfer)


def _most_connections(num_threads: int) -> int:
    """A quarter of what the system grants is left for checkpoints and contributions."""
    most, (granted, _) = num_threads + SILENT_CONNECTIONS, getrlimit(RLIMIT_NOFILE)
    return most if granted == RLIM_INFINITY else min(most, granted * 3 // 4)


_certificate = lru_cache(maxsize=4096)(x509.load_pem_x509_certificate)


def _certificate_pem(context: Any) -> bytes:
    """The peer's certificate, which TLS has verified."""
    return bytes(context.auth_context().get("x509_pem_cert", [b""])[0])


def _peer(context: Any) -> str:
    """Its `host:port`."""
    return unquote(context.peer()).partition(":")[2]


def _tolerant(parse: Callable[[bytes], Any], most_bytes: int) -> Callable[[bytes], Any]:
    """The same, but False for bytes that are no message, or more than one may have.

    A deserializer that raised would leave gRPC's server unable to stop, now and then.
    """

    def parse_or_mark(data: bytes) -> Any:
        if len(data) > most_bytes:
            return False
        try:
            message = parse(data)
        except DecodeError:
            return False
        found = message.header if isinstance(message, Part) else message
        if found is not None:
            found.DiscardUnknownFields()  # nobody bounds them
        return message

    return parse_or_mark


def _refuse_garbage(context: Any, message: Any) -> Any:
    if message is False:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what arrived is no message of fedwan's")
    return message


# What `fedwan doctor link` sends and fetches, outside of any run ---------------------------------


@cache
def _noise_block() -> memoryview:
    block = random.Random(0).randbytes(_BLOCK_BYTES + _CHUNK_BYTES)  # noqa: S311 (no secret)
    return memoryview(block)


class Noise:
    """A payload that cannot be packed: a block of noise again and again, read by the chunk."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, offset: int, size: int) -> Bytes:  # noqa: D102
        at = offset % _BLOCK_BYTES
        return _noise_block()[at : at + size]


def _noise_delivery(request: wire.DownloadRequest, congestion: str) -> Delivery:
    num_bytes = request.version
    if not 0 < num_bytes <= MAX_NOISE_BYTES:
        raise PayloadError(f"a measurement of {num_bytes} bytes; ask for 1 to {MAX_NOISE_BYTES}")
    header = wire.DownloadHeader(
        num_bytes=num_bytes, chunk_bytes=_CHUNK_BYTES, congestion=congestion
    )
    return Delivery(header, Noise(num_bytes))
