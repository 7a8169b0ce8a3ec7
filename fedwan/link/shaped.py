"""A link that behaves like a slower one, and what theory says that loss leaves of a link's rate.

What a call would have taken on the wide area is waited out after it, less what it really took.
Reno and cubic take every lost packet for a full link: at a loss of p one flow gets no more than
MSS / RTT · √(3/2) / √p (Mathis et al. 1997), or with cubic 1.054 · MSS · (RTT / p)^(3/4) / RTT
(RFC 9438, section 5.1, C = 0.4, β = 0.7). Estimates; the benchmarks emulate the network itself.
"""

# ruff: noqa: D102 (methods are those of `fedwan.link.base.Link`)

from __future__ import annotations

import math
import time
from collections.abc import Callable

from fedwan.codecs.payload import Source
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Link, Signals

MSS_BYTES = 1448


def goodput_mbit(rate_mbit: float, rtt_ms: float, loss: float) -> float:
    """Mbit/s that one TCP flow gets; infinite where nothing limits it.

    >>> round(goodput_mbit(200.0, 150.0, 0.001))
    3
    >>> goodput_mbit(200.0, 100.0, 0.0)
    200.0
    """
    rate = rate_mbit or math.inf
    if not (loss and rtt_ms):
        return rate
    return min(rate, MSS_BYTES * 8 / 1e6 / (rtt_ms / 1e3) * math.sqrt(1.5 / loss))


def flow_mbit(congestion: str, rtt_ms: float, loss: float) -> float:
    """Mbit/s that one flow gets at most at this loss, by the theory of its congestion control.

    >>> round(flow_mbit("reno", 100.0, 0.0001), 1), round(flow_mbit("cubic", 100.0, 0.0001), 1)
    (14.2, 21.7)
    """
    reno = goodput_mbit(0.0, rtt_ms, loss)
    if congestion != "cubic" or not (loss and rtt_ms):
        return reno
    packets: float = 1.054 * (rtt_ms / 1e3 / loss) ** 0.75
    return max(reno, packets * MSS_BYTES * 8 / 1e6 / (rtt_ms / 1e3))


class ShapedLink:
    """Wraps a link; `rate_mbit` is that of each direction (0: no limit), `loss` from 0 to 1."""

    def __init__(
        self,
        inner: Link,
        rate_mbit: float = 0.0,
        rtt_ms: float = 0.0,
        loss: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._bytes_per_s = goodput_mbit(rate_mbit, rtt_ms, loss) * 1e6 / 8
        self._rtt_s = rtt_ms / 1e3
        self._sleep = sleep
        self._clock = clock

    @property
    def signals(self) -> Signals:
        return self._inner.signals

    @property
    def bytes_up(self) -> int:
        return self._inner.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._inner.bytes_down

    def join(self, hello: wire.Hello) -> wire.Welcome:
        return self._inner.join(hello)

    def heartbeat(self, step: int) -> None:
        self._inner.heartbeat(step)

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        began = self._clock()
        receipt = self._inner.upload(header, payload)
        self._wait_out(self._rtt_s + payload.num_bytes / self._bytes_per_s, began)
        return receipt

    def download(self, request: wire.DownloadRequest) -> Delivery:
        delivery = self._inner.download(request)
        if delivery.payload is not None:
            # What was waited for before the payload existed is no part of its transfer.
            self._wait_out(
                self._rtt_s + delivery.payload.num_bytes / self._bytes_per_s, self._clock()
            )
        return delivery

    def report(self, report: wire.QualityReport) -> None:
        self._inner.report(report)

    def leave(self, farewell: wire.Farewell) -> None:
        self._inner.leave(farewell)

    def close(self) -> None:
        self._inner.close()

    def _wait_out(self, duration_s: float, began: float) -> None:
        remaining = duration_s - (self._clock() - began)
        if remaining > 0:
            self._sleep(remaining)
