"""The coordinator's end of a measurement of the link: takes and sends bytes that mean nothing.

A site's probe is several streams at once. What it may cost is bounded here: seconds, bytes,
streams, and one probe at a time for each site. `fedwan.link.measure` is the other end.
"""

from __future__ import annotations

import math
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedwan.errors import ConfigError, PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.tcp_info import TcpWatch, tcp_settings

__all__ = ["MAX_SECONDS", "MAX_STREAMS", "TICK_S", "Probes", "Ticks", "nothings"]

MAX_SECONDS = 10.0
MAX_BYTES = 16 << 30
"""Of one stream; more than it can bring in that time."""
MAX_STREAMS = 16
"""Of one probe."""
GRACE_S = 10.0
"""After which a stream that has become silent is cut off."""
TICK_S = 0.1
_LEAST_PART = 16 << 10
_MOST_PART = 256 << 10
_NOTHING = bytes(_MOST_PART)  # TLS makes it as incompressible as anything else


class Ticks:
    """Bytes that arrived in each tenth of a second since the first of them.

    Args:
        clock: monotonic seconds; a test's may differ.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = math.nan
        self.num_bytes = 0
        self.counts: list[int] = []

    def add(self, num_bytes: int) -> float:
        """Count what arrived now; seconds since the first."""
        if math.isnan(self._began):
            self._began = self._clock()
        elapsed_s = self._clock() - self._began
        self.num_bytes += num_bytes
        index = int(elapsed_s / TICK_S)
        self.counts += [0] * (index + 1 - len(self.counts))
        self.counts[index] += num_bytes
        return elapsed_s


def nothings(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[bytes]:
    """Bytes for so long, in parts small enough for a slow link and large enough for a fast one."""
    ends, num_bytes = clock() + seconds, 0
    while clock() < ends and num_bytes < MAX_BYTES:
        size = min(max(num_bytes // 64, _LEAST_PART), _MOST_PART)
        num_bytes += size
        yield _NOTHING[:size]


class Probes:
    """Serves the probes of all sites."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, tuple[int, int]] = {}  # the probe of a site, and its streams

    def receive(self, site: str, parts: Iterator[wire.ProbePart], context: Any) -> wire.ProbeReply:
        """Take an upload, for as long as it asks for.

        Args:
            site: whose certificate it is.
            parts: of which the first carries the request.
            context: of gRPC.

        Raises:
            PayloadError: not a request.
            ConfigError: another probe of the site is under way.
        """
        with _cut_off(context, MAX_SECONDS + GRACE_S):
            first = next(parts, None)
            if first is None or not first.HasField("request"):
                raise PayloadError("a probe began without its request; refused")
            seconds = _seconds(first.request)
            with self._turn(site, first.request.probe):
                watch, ticks = TcpWatch(_peer(context)), Ticks()
                ticks.add(len(first.data))
                for part in parts:
                    if ticks.add(len(part.data)) >= seconds or ticks.num_bytes >= MAX_BYTES:
                        break
                return _reply(watch, ticks.counts)

    def send(self, site: str, request: wire.ProbeRequest, context: Any) -> Iterator[wire.ProbePart]:
        """Send for as long as asked for; the last part carries the reply.

        Args:
            site: whose certificate it is.
            request: what is asked for.
            context: of gRPC.

        Raises:
            PayloadError, ConfigError: see `receive`.
        """
        seconds = _seconds(request)
        with self._turn(site, request.probe), _cut_off(context, seconds + GRACE_S):
            watch = TcpWatch(_peer(context))
            for data in nothings(seconds):
                yield wire.ProbePart(data=data)
            yield wire.ProbePart(reply=_reply(watch, []))

    @contextmanager
    def _turn(self, site: str, probe: int) -> Iterator[None]:
        with self._lock:
            current, num_streams = self._turns.get(site, (probe, 0))
            if current != probe:
                raise ConfigError(f"another probe of {site} is under way; try again in seconds")
            if num_streams >= MAX_STREAMS:
                raise PayloadError(f"a probe has {MAX_STREAMS} streams at most")
            self._turns[site] = (probe, num_streams + 1)
        try:
            yield
        finally:
            with self._lock:
                _, num_streams = self._turns.pop(site)
                if num_streams > 1:
                    self._turns[site] = (probe, num_streams - 1)


def _seconds(request: wire.ProbeRequest) -> float:
    seconds = request.seconds
    if not 0 < seconds <= MAX_SECONDS:  # not a number is neither
        raise PayloadError(f"a probe of {seconds:g} s; ask for more than 0, up to {MAX_SECONDS:g}")
    return seconds


def _reply(watch: TcpWatch, ticks: list[int]) -> wire.ProbeReply:
    return wire.ProbeReply(ticks=ticks, tcp=watch.state(), settings=tcp_settings())


def _peer(context: Any) -> str:
    """`host:port` of the connection that a call came by."""
    _, _, address = urllib.parse.unquote(context.peer()).partition(":")
    return address


@contextmanager
def _cut_off(context: Any, after_s: float) -> Iterator[None]:
    """End a call whose other side has become silent: it would hold a thread for ever."""
    timer = threading.Timer(after_s, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
