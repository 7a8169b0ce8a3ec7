"""How long bytes take on a link; docs/plan.md says where each constant comes from."""

from __future__ import annotations

import math
from typing import NamedTuple

from fedwan.config import LinkConfig
from fedwan.link.framing import FAST
from fedwan.link.measure import Measurement, Way
from fedwan.link.rpc import num_channels
from fedwan.link.tcp import MSS_BYTES, flow_mbit

PACKET_BYTES = 1500
ACK_BYTES = 52
ACK_SHARE = 1 / (1 + ACK_BYTES / (2 * PACKET_BYTES))
"""What is left of a direction while the other one is as busy."""
OVERSHOOT = 0.04
"""Of what bbr sends without a pace, what is lost at the queue; 0.02 to 0.06 were seen."""
PROBE_EVERY_S = 10.0
"""bbr empties the link to see the round trip, for `PROBE_S` or a round trip, and refills it."""
PROBE_S = 0.2


class Pipe(NamedTuple):
    """One direction of a link: its rate for payloads, once TCP has found it, and round trip."""

    bytes_per_s: float
    rtt_s: float

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds from the first byte that leaves to the last."""
        return num_bytes / self.bytes_per_s


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
        mbit *= 1 - link.loss
        mbit *= 1 - (max(PROBE_S, rtt_s) + rtt_s) / PROBE_EVERY_S
        mbit *= 1.0 if pace < rate else 1 - OVERSHOOT
    else:
        channels = num_channels(is_bbr, bool(link.pace_mbit))
        mbit = min(mbit, channels * flow_mbit("cubic", link.rtt_ms, link.loss))
    pipe = Pipe(max(mbit, 1e-6) * 1e6 / 8, rtt_s)
    return WireLink(pipe, pipe)


def measured_link(found: Measurement) -> WireLink:
    """The link that `fedwan doctor link` measured: goodput is what it saw, theory has no say."""

    def pipe(way: Way) -> Pipe:
        bytes_per_s = max(way.mbit, 1e-3) * ACK_SHARE * 1e6 / 8
        return Pipe(bytes_per_s, found.rtt_ms / 1e3)

    return WireLink(pipe(found.up), pipe(found.down))
