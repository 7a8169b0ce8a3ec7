"""A site's measurement of its link: round trip, goodput each way, and what TCP did meanwhile.

Goodput is what arrives in the second half of a stream's time, when TCP has found its rate. It is
measured on one channel and on several, each a new connection with the settings of a real transfer,
over the data plane's own port. `fedwan.link.advice` says what the figures mean.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from fedwan.errors import ConfigError, FedwanError, IdentityError, LinkLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import CLIENT_OPTIONS
from fedwan.link.congestion import Congestion
from fedwan.link.handshake import handshake_complaint
from fedwan.link.methods import Stub
from fedwan.link.probe import TICK_S, Ticks, nothings
from fedwan.link.tcp_info import TcpWatch, tcp_settings, together
from fedwan.link.tls import Identity

__all__ = ["Machine", "Measurement", "Way", "measure"]

DIAL_S = 5.0
DRAIN_S = 15.0
"""How long a slow link may take to bring what was sent in time."""
SURPLUS_S = 1.0
"""Sent beyond the time, so that the far end, whose clock began later, is never short."""
BEST_TICKS = 10
"""A second: in a shorter time, what waited behind a lost packet would look like a rate."""
_TOO_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

Stream = tuple[list[int], wire.TcpState, wire.TcpSettings]


@dataclass(frozen=True)
class Way:
    """One direction; of TCP, what its sender's kernel tells."""

    one_mbit: float
    """Goodput of one channel."""
    all_mbit: float
    """Of all channels together."""
    best_mbit: float
    """The most that arrived in any second, which the path is sure to carry."""
    again: float | None
    """Share of the bytes of all channels that were sent again; None if the kernel does not tell."""
    loss: float | None
    """The same of one channel if it lost less: several make more of their losses themselves."""
    congestion: str
    """Control in use; empty if the kernel does not tell."""
    window: float
    """Share of the time that the sender waited for the receiver's window."""
    buffer: float
    """Share of the time that the sender waited for room in its own buffer."""
    rtt_ms: float
    """Under this load; 0 if the kernel does not tell."""


@dataclass(frozen=True)
class Machine:
    """What a kernel allows sockets; empty where it does not tell."""

    allowed: tuple[str, ...]
    """Congestion controls that any user may set."""
    available: tuple[str, ...]
    """Those that are loaded."""
    receive: tuple[int, ...]
    """net.ipv4.tcp_rmem: least, default and most bytes."""
    send: tuple[int, ...]
    """net.ipv4.tcp_wmem."""


@dataclass(frozen=True)
class Measurement:
    """All that advice depends on."""

    address: str
    site: str
    channels: int
    rtt_ms: float
    """Without load."""
    up: Way
    down: Way
    here: Machine
    """The site."""
    there: Machine
    """The coordinator."""
    pace_mbit: float = 0.0
    """Of the site, all channels together; 0 for none."""


def measure(
    address: str,
    identity: Identity,
    channels: int,
    seconds: float,
    congestion: str = "auto",
    pace_mbit: float = 0.0,
) -> Measurement:
    """Measure the link to a coordinator; takes four times `seconds` and a little.

    Args:
        address: `host:port` of its data plane.
        identity: the site's.
        channels: TCP connections of the second measurement each way.
        seconds: of each measurement.
        congestion: control of this site's connections, see `fedwan.link.congestion`; what comes
            down has the coordinator's.
        pace_mbit: most that they may carry up together; 0 sets no limit.

    Raises:
        ConfigError: nothing answers there, or no data plane that can be probed.
        IdentityError: either side refuses the other's certificate.
        LinkLost: the link broke meanwhile.
    """
    connect_ms = _reach(address)
    if complaint := handshake_complaint(address, identity):
        raise IdentityError(complaint)
    request = wire.ProbeRequest(probe=random.getrandbits(64), seconds=seconds)
    prober = _Prober(address, identity, request, congestion, pace_mbit)
    down_one, down_all = prober.run(1, _down), prober.run(channels, _down)
    up_one, up_all = prober.run(1, _up), prober.run(channels, _up)
    least_ms = [
        stream[1].least_rtt_us / 1e3
        for stream in (*down_one, *down_all, *up_one, *up_all)
        if stream[1].least_rtt_us
    ]
    return Measurement(
        address=address,
        site=identity.name,
        channels=channels,
        rtt_ms=min([connect_ms, *least_ms]),
        up=_way(up_one, up_all, seconds),
        down=_way(down_one, down_all, seconds),
        here=_machine(tcp_settings()),
        there=_machine(up_one[0][2]),
        pace_mbit=pace_mbit,
    )


class _Prober:
    """Runs streams of one probe."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        request: wire.ProbeRequest,
        congestion: str,
        pace_mbit: float,
    ) -> None:
        self._address = address
        self._credentials = identity.grpc_channel_credentials()
        self._request = request
        # Chosen once: a control that this machine refuses is told of once.
        self._control = Congestion(congestion).name or "system"
        self._pace_mbit = pace_mbit

    def run(
        self, channels: int, stream: Callable[[Stub, wire.ProbeRequest], Stream]
    ) -> list[Stream]:
        """One stream on each of so many new channels, at once."""
        choice = Congestion(self._control, self._pace_mbit / channels)
        with self._dialled(channels) as stubs, ThreadPoolExecutor(channels) as pool:
            choice.apply_to_peer(self._address)
            watch = TcpWatch(self._address)
            try:
                streams = list(pool.map(lambda stub: stream(stub, self._request), stubs))
            except grpc.RpcError as error:
                raise self._explain(error) from None
            if stream is _up:
                # The sender of these is this process; its kernel counts them all together.
                streams[0] = (streams[0][0], watch.state(), streams[0][2])
            return streams

    @contextmanager
    def _dialled(self, num: int) -> Iterator[list[Stub]]:
        channels = [
            grpc.secure_channel(self._address, self._credentials, options=CLIENT_OPTIONS)
            for _ in range(num)
        ]
        try:
            deadline = time.monotonic() + DIAL_S
            for channel in channels:
                ready = grpc.channel_ready_future(channel)
                try:
                    ready.result(timeout=max(0.0, deadline - time.monotonic()))
                except grpc.FutureTimeoutError:
                    ready.cancel()
                    raise ConfigError(
                        f"{self._address} answers, but not as a data plane; give the address of "
                        "link.port, not of the front door (link.door_port)"
                    ) from None
            yield [Stub(channel) for channel in channels]
        finally:
            for channel in channels:
                channel.close()

    def _explain(self, error: grpc.RpcError) -> FedwanError:
        code, text = error.code(), str(error.details())
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return IdentityError(text)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(
                f"the coordinator at {self._address} knows no probes; install this version of "
                "fedwan there too"
            )
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            return ConfigError(text)
        return LinkLost(
            f"the link to {self._address} broke while it was measured "
            f"({code.name}: {text}); try again"
        )


def _down(stub: Stub, request: wire.ProbeRequest) -> Stream:
    ticks, reply = Ticks(), wire.ProbeReply()
    try:
        for part in stub.ProbeDown(request, timeout=request.seconds + DRAIN_S):
            if part.HasField("reply"):
                reply = part.reply
            else:
                ticks.add(len(part.data))
    except grpc.RpcError as error:
        # A very slow link: what came counts, though the far end's figures did not.
        if error.code() not in _TOO_LATE or not ticks.num_bytes:
            raise
    return ticks.counts, reply.tcp, reply.settings


def _up(stub: Stub, request: wire.ProbeRequest) -> Stream:
    def parts() -> Iterator[wire.ProbePart]:
        yield wire.ProbePart(request=request)
        for data in nothings(request.seconds + SURPLUS_S):
            yield wire.ProbePart(data=data)

    reply = stub.ProbeUp(parts(), timeout=request.seconds + DRAIN_S)
    return list(reply.ticks), wire.TcpState(), reply.settings


def _reach(address: str) -> float:
    """Milliseconds that a TCP connection takes, which is a round trip."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as sock:
            sock.settimeout(DIAL_S)
            began = time.monotonic()
            sock.connect(found)
            return (time.monotonic() - began) * 1e3
    except socket.gaierror as error:
        raise ConfigError(
            f"no machine is called {host!r} ({error.strerror}); check the coordinator's address"
        ) from None
    except ConnectionRefusedError:
        raise ConfigError(
            f"nothing listens at {address}; the data plane does while a run is going on, "
            "on link.port"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{address} cannot be reached ({error.strerror or f'no answer in {DIAL_S:g} s'}); "
            "check the address, and the firewalls on the way"
        ) from None


def _way(one: Sequence[Stream], all_: Sequence[Stream], seconds: float) -> Way:
    num_ticks = round(seconds / TICK_S)
    single, total = _sum(one, num_ticks), _sum(all_, num_ticks)
    lone, tcp = (together(stream[1] for stream in streams) for streams in (one, all_))
    busy_us = tcp.busy_us or 1
    shares = [x.bytes_again / x.bytes_sent for x in (tcp, lone) if x.bytes_sent]
    return Way(
        one_mbit=_late_mbit(single),
        all_mbit=_late_mbit(total),
        best_mbit=max(_best_mbit(single), _best_mbit(total)),
        again=shares[0] if shares else None,
        loss=min((share for share in shares if share), default=0.0) if shares else None,
        congestion=tcp.congestion,
        window=min(1.0, tcp.window_us / busy_us),
        buffer=min(1.0, tcp.buffer_us / busy_us),
        rtt_ms=tcp.rtt_us / 1e3,
    )


def _sum(streams: Sequence[Stream], num_ticks: int) -> list[int]:
    """Bytes of all streams in each tick; those that began last may end a tick later."""
    rows = [ticks[:num_ticks] + [0] * (num_ticks - len(ticks)) for ticks, _, _ in streams]
    return [sum(column) for column in zip(*rows, strict=True)]


def _late_mbit(ticks: Sequence[int]) -> float:
    late = ticks[len(ticks) // 2 :]
    return sum(late) * 8 / 1e6 / (len(late) * TICK_S)


def _best_mbit(ticks: Sequence[int]) -> float:
    size = min(BEST_TICKS, len(ticks))
    sums = [sum(ticks[i : i + size]) for i in range(len(ticks) - size + 1)]
    return max(sums) * 8 / 1e6 / (size * TICK_S)


def _machine(settings: wire.TcpSettings) -> Machine:
    return Machine(
        allowed=tuple(settings.allowed),
        available=tuple(settings.available),
        receive=tuple(settings.receive),
        send=tuple(settings.send),
    )
