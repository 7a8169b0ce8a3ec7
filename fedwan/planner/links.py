"""How long bytes take on a link; docs/plan.md says where each constant comes from."""

from __future__ import annotations

import math
from typing import NamedTuple

from fedwan.config import LinkConfig
from fedwan.link.framing import FAST
from fedwan.link.measure import Measurement, Way
from fedwan.link.tcp import MSS_BYTES

PACKET_BYTES = 1500
ACK_BYTES = 52
ACK_SHARE = 1 / (1 + ACK_BYTES / (2 * PACKET_BYTES))
"""What is left of a direction while the other one is as busy."""
OVERSHOOT = 0.04
"""Of what bbr sends without a pace, what is lost at the queue; 0.02 to 0.06 were seen."""
PROBE_EVERY_S = 10.0
"""bbr empties the link to see the round trip, for `PROBE_S` or a round trip, and refills it."""
PROBE_S = 0.2
FIRST_WINDOW_BYTES = 10 * MSS_BYTES
"""RFC 6928."""
LEAST_TIMEOUT_S = 0.2
"""Linux's, beyond the round trip."""


class Pipe(NamedTuple):
    """One direction of a link: its rate for payloads, once TCP has found it, and round trip."""

    bytes_per_s: float
    rtt_s: float
    restarts: bool = False
    """Whether the window starts small again after a pause."""

    def transfer_s(self, num_bytes: float, idle_s: float) -> float:
        """Seconds from the first byte that leaves to the last."""
        if self.rtt_s == 0 or idle_s <= 0 or (idle_s < math.inf and not self.restarts):
            return num_bytes / self.bytes_per_s
        full = window = self.bytes_per_s * self.rtt_s
        if idle_s == math.inf:
            window = FIRST_WINDOW_BYTES
        elif full < math.inf:  # nothing else says how large the window was
            timeouts = min(idle_s / (self.rtt_s + LEAST_TIMEOUT_S), 64.0)
            window = max(full / 2 ** int(timeouts), FIRST_WINDOW_BYTES)
        spent_s = 0.0
        while window < full and num_bytes > window:
            num_bytes -= window
            window *= 2
            spent_s += self.rtt_s
        return spent_s + num_bytes / self.bytes_per_s


class WireLink(NamedTuple):
    """Both directions, each with a line of its own."""

    up: Pipe
    down: Pipe

    def packs(self) -> bool:
        """Whether payloads are packed on it."""
        return min(self.up.bytes_per_s, self.down.bytes_per_s) < FAST


def modelled_link(link: LinkConfig) -> WireLink:
    """The link that a configuration describes, alike both ways."""
    rtt_s = link.rtt_ms / 1e3
    is_bbr = link.congestion in ("auto", "bbr")
    rate, pace = link.rate_mbit or math.inf, link.pace_mbit or math.inf
    mbit = min(rate, pace) * MSS_BYTES / PACKET_BYTES * ACK_SHARE
    if is_bbr:
        mbit *= 1 - (max(PROBE_S, rtt_s) + rtt_s) / PROBE_EVERY_S
        mbit *= 1.0 if pace < rate else 1 - OVERSHOOT
    pipe = Pipe(max(mbit, 1e-6) * 1e6 / 8, rtt_s, restarts=not is_bbr)
    return WireLink(pipe, pipe)


def measured_link(found: Measurement) -> WireLink:
    """The link that `fedwan doctor link` measured: goodput is what it saw, theory has no say."""

    def pipe(way: Way) -> Pipe:
        bytes_per_s = max(way.mbit, 1e-3) * ACK_SHARE * 1e6 / 8
        return Pipe(bytes_per_s, found.rtt_ms / 1e3, not way.congestion.startswith("bbr"))

    return WireLink(pipe(found.up), pipe(found.down))
