"""The data plane's calls: methods, options, channels, bytes counted, and what to do if one fails.

The service is the one of wire.proto; only chunks are read and written by `fedwan.link.framing`.
Each channel is a TCP connection.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from fedwan.errors import (
    DiskFull,
    FedwanError,
    IdentityError,
    LinkLost,
    NotJoined,
    PayloadError,
    SessionLost,
    SiteDrained,
    SiteEjected,
)
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import parser, serialize
from fedwan.link.tcp import NUM_CHANNELS, read_state
from fedwan.link.tls import Identity

log = logging.getLogger(__name__)

_SERVICE = wire.DESCRIPTOR.services_by_name["DataPlane"]
SERVICE = _SERVICE.full_name
MAX_MESSAGE_BYTES = 32 << 20
MOST_BYTES = {
    "Control": 4 << 10,
    "Download": 1 << 20,
    "Leave": 256 << 10,
    "Unmask": 256 << 10,
    "Join": 6 << 20,
}
"""Of a call's message, before it is parsed: numbers and maps take many times their bytes."""
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
"""Of both ends."""
MAX_WAITING = 16
"""Fragments of one site whose updates it waits for at once, unless there are more."""
WINDOWS_BYTES = 64 << 20
"""What all sites may have sent and no handler has asked for: 5 Gbit/s at 100 ms. gRPC's own windows
take a busy coordinator for a long link: 64 sites then held 0.9 GB."""
MIN_WINDOW_BYTES = 256 << 10
"""A window bounds the rate of its connection: here to 21 Mbit/s at 100 ms."""
FEW_SITES = 8
"""Up to so many, gRPC chooses the windows."""
PREFIX_BYTES = 5
"""gRPC's, for each message. What HTTP/2, TLS and TCP add is not counted: below 0.5 %."""


class Method(NamedTuple):
    """How a call's messages are read and written."""

    kind: str
    """`unary_unary`, `stream_unary`, …: what the site sends, and what the coordinator does."""
    write_request: Callable[[Any], bytes]
    read_request: Callable[[bytes], Any]
    write_reply: Callable[[Any], bytes]
    read_reply: Callable[[bytes], Any]


def _method(found: MethodDescriptor) -> Method:
    """Streams of one direction carry chunks."""
    streams = found.client_streaming, found.server_streaming
    kind = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    forms: list[Callable[..., Any]] = []
    for is_stream, message in zip(streams, (found.input_type, found.output_type), strict=True):
        kind_of = GetMessageClass(message)
        if is_stream and not all(streams):
            forms += [serialize, parser(kind_of)]
        else:
            forms += [kind_of.SerializeToString, kind_of.FromString]
    return Method(kind, *forms)


METHODS = {found.name: _method(found) for found in _SERVICE.methods}


class ByteCounter:
    """Bytes up and down, of messages as they are written and read; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.up = 0
        self.down = 0

    def sent(self, data: bytes) -> bytes:
        """The same, counted."""
        with self._lock:
            self.up += len(data) + PREFIX_BYTES
        return data

    def received(self, data: bytes) -> bytes:
        """The same, counted."""
        with self._lock:
            self.down += len(data) + PREFIX_BYTES
        return data


class Stub:
    """A site's calls on one channel."""

    Join: Any
    Control: Any
    Upload: Any
    Download: Any
    Report: Any
    Unmask: Any
    Leave: Any

    def __init__(
        self, channel: grpc.Channel, counter: ByteCounter, address: str, identity: Identity
    ) -> None:
        self.address = address
        self._counter = counter
        self.connect(channel, identity)

    def connect(self, channel: grpc.Channel, identity: Identity) -> None:
        """Calls go over this channel from now on, whose certificate is this identity's."""
        self.identity = identity
        counter = self._counter
        for name, (kind, write, *_, read) in METHODS.items():
            call = getattr(channel, kind)(
                f"/{SERVICE}/{name}",
                request_serializer=lambda message, write=write: counter.sent(write(message)),
                response_deserializer=lambda data, read=read: read(counter.received(data)),
            )
            setattr(self, name, call)


def window_options(num_sites: int, channels: int) -> list[tuple[str, int]]:
    """Options of gRPC that divide `WINDOWS_BYTES` among the connections of many sites."""
    if num_sites <= FEW_SITES:
        return []
    share = WINDOWS_BYTES // (num_sites * channels)
    return [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", max(MIN_WINDOW_BYTES, share)),
    ]


def threads_per_site(num_fragments: int) -> int:
    """Calls that a site may have open at once; a thread is made when none is idle.

    Control, words, downloads that wait for a round, and the stripes of two transfers each way.
    """
    return 2 + max(MAX_WAITING, num_fragments) + 4 * NUM_CHANNELS


# Calls that stand still ---------------------------------------------------------------------------

STALL_S = 10.0
"""Between two looks at the calls under way; the kernel finds as fast that a path is dead."""
MAX_STILL = 3
"""Looks in a row that find nothing moved, after which a call is cancelled."""
LEAST_BYTES_PER_S = 4096.0
"""Of connections that carry payload; pings, heartbeats and polls are less."""


class Watched:
    """A call that is cancelled once neither messages nor bytes of its connections move.

    The other end may hang, and its connections stand all the same. What counts are looks and not
    time, so that a process that was stopped goes on.
    """

    def __init__(self, address: str, call: Any) -> None:
        self.call = call
        self.still = 0
        """Looks since a message was taken, here or there."""
        self._address = address
        self._moved = 0

    def result(self, call: Any) -> Any:
        """What a call ends with."""
        self.call = call
        try:
            return call.result()
        except grpc.FutureCancelledError:
            raise call from None

    def look(self) -> None:
        """Called every `STALL_S`."""
        if self.still:  # else the kernel need not be asked
            before, self._moved = self._moved, read_state(self._address).moved
            if self._moved - before > LEAST_BYTES_PER_S * STALL_S:
                self.still = 0
        self.still += 1
        if self.still > MAX_STILL and self.call is not None:
            self.call.cancel()


_watched: set[Watched] = set()
_starting = threading.Lock()


@contextmanager
def watch(address: str, call: Any = None) -> Iterator[Watched]:
    """Watch a call to `host:port`, or from there, as long as the context lasts."""
    with _starting:
        _begin_to_watch()
    watched = Watched(address, call)
    _watched.add(watched)
    try:
        yield watched
    finally:
        _watched.discard(watched)


@cache
def _begin_to_watch() -> None:
    def run() -> None:
        while True:
            time.sleep(STALL_S)
            look()

    threading.Thread(target=run, daemon=True, name="watch").start()


def look() -> None:
    """Look at every call of this process once."""
    try:
        for watched in tuple(_watched):
            watched.look()
    except Exception:  # such as where no descriptor is left for a moment: the next look may do
        log.exception("calls under way could not be looked at")


def messages(address: str, call: Any, stream: Iterable[Any] | None = None) -> Iterator[Any]:
    """What a call brings, or a stream of it; it is cancelled once nothing comes any more."""
    with watch(address, call) as watched:
        for message in call if stream is None else stream:
            watched.still = 0
            yield message


# Failed calls -------------------------------------------------------------------------------------

Code = grpc.StatusCode
_PASSING = {
    *(Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED),
    *(Code.RESOURCE_EXHAUSTED, Code.INTERNAL, Code.UNKNOWN),
}
FINAL: dict[grpc.StatusCode, type[FedwanError]] = {
    Code.UNAUTHENTICATED: IdentityError,
    Code.NOT_FOUND: NotJoined,
    Code.FAILED_PRECONDITION: SessionLost,
    Code.ABORTED: SiteDrained,
    Code.PERMISSION_DENIED: SiteEjected,
}
"""What no attempt can mend, by the status that tells it."""


def code_of(error: FedwanError) -> grpc.StatusCode:
    """The status that tells a site of an error."""
    kinds = {Code.INVALID_ARGUMENT: PayloadError, Code.RESOURCE_EXHAUSTED: DiskFull} | FINAL
    return next(
        (code for code, kind in kinds.items() if isinstance(error, kind)), Code.FAILED_PRECONDITION
    )


FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0
_UNREACHED = re.compile(r"failed to connect to all addresses; last error: .*: ")
"""What gRPC says before the system's words."""


class Patience:
    """Counts how long a link has been failing; any success starts the count anew.

    `diagnose` says what a TLS handshake complains about, if it does, or raises what is final.
    """

    def __init__(
        self,
        address: str,
        patience_s: float,
        diagnose: Callable[[], str | None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._address = address
        self._patience_s = patience_s
        self._diagnose = diagnose
        self._sleep = sleep
        self._failing_since: float | None = None
        self._wait_s = FIRST_WAIT_S

    def succeeded(self) -> None:
        """Something came through."""
        self._failing_since = None
        self._wait_s = FIRST_WAIT_S

    def failed(self, error: grpc.RpcError) -> None:
        """Wait before the next attempt, or raise what no attempt can mend; else `LinkLost`."""
        code, text = error.code(), _UNREACHED.sub("", str(error.details()))
        if code is Code.CANCELLED:
            text = "connected, but it neither takes nor sends anything"
        if code in FINAL:
            raise FINAL[code](text) from None
        if code is Code.RESOURCE_EXHAUSTED and "larger than max" in text:
            raise PayloadError(f"too much for one message: {text}")
        if code is Code.INVALID_ARGUMENT:
            raise PayloadError(text) from None
        if code not in _PASSING:
            raise LinkLost(f"the coordinator at {self._address} answers {code.name}: {text}")
        now_s = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now_s
        if self._wait_s in (FIRST_WAIT_S, LONGEST_WAIT_S):
            # Again later too: a certificate may expire while the coordinator is away.
            text = self._diagnose() or text
        if now_s - self._failing_since > self._patience_s:
            raise LinkLost(
                f"the coordinator at {self._address} could not be reached for "
                f"{self._patience_s:g} s ({text}); check its address, its service, the firewall "
                "and both clocks, or raise round.patience_s"
            ) from None
        self._sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
