"""What coding, merging and copying take, what a fragment weighs, and how long bytes take.

Coding is that of one core of the machine of docs/results.md (`benchmarks/codecs.py`); docs/log.md
has the rest ("codecs in plain torch"), docs/plan.md where each constant of links comes from. What
packing takes is left out: it goes on beside sending.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fedwan.codecs import fp32
from fedwan.config import LinkConfig
from fedwan.fragments import Fragment, whole
from fedwan.link.measure import Measurement, Way
from fedwan.link.tcp import MSS_BYTES
from fedwan.state import Layout
from fedwan.strategy import Strategy

PACKET_BYTES = 1500
ACK_BYTES = 52
ACK_SHARE = 1 / (1 + ACK_BYTES / (2 * PACKET_BYTES))
"""What is left of a direction while the other one is as busy."""
OVERSHOOT = 0.04
"""Of what bbr sends without a pace, what is lost at the queue; 0.02 to 0.06 were seen."""
PROBE_EVERY_S = 10.0
"""bbr empties the link to see the round trip, for `PROBE_S` or a round trip, and refills it."""
PROBE_S = 0.2


class Speed(NamedTuple):
    """Of a codec, seconds per value (`add_s` decodes, too); what packing leaves of its bytes."""

    encode_s: float
    add_s: float
    packed: float = 1.0


_TABLE = {
    "fp32": (26_991, 10_079, 0.924),
    "bf16": (5_909, 7_143, 0.777),
    "int8": (3_034, 6_777, 0.938),
    "int4": (2_840, 4_845, 0.845),
    "topk2": (588, 3_325, 1.0),
}
"""MB/s of fp32 to encode and to add (docs/results.md); what packing leaves of normal values."""
CODECS = {name: Speed(4e-6 / up, 4e-6 / add, left) for name, (up, add, left) in _TABLE.items()}
_LOGGED_VALUES = 57_182_660
"""Of the model whose times docs/log.md has."""
_CHECK_S = 0.040 / _LOGGED_VALUES
"""To check a value of a contribution: layout, checksum, finite."""
_OUTER_S = (0.105 + 0.043 + 0.015) / _LOGGED_VALUES
"""Outer step, commit and moving average, once a round."""
_COPY_S = 0.3e-9
"""To copy or blend a value that is in memory: 12 bytes at 40 GB/s."""


@dataclass(frozen=True)
class Costs:
    """What is not the same for all settings."""

    stands_for: float = 1.0
    """Sites for which each simulated one stands: all are merged."""
    packs: bool = True

    def left(self, codec: str) -> float:
        """Share of a codec's bytes that travels."""
        return speed(codec).packed if self.packs else 1.0


def speed(codec: str) -> Speed:
    """Of a codec; as slow as the slowest if it is not in the table."""
    return CODECS.get(codec, Speed(*map(max, zip(*CODECS.values(), strict=True))))


class Load(NamedTuple):
    """Of one fragment: bytes as they travel, and seconds of one party's processor.

    A site holds a copy where the strategy overlaps, applies an update to the global weights, and
    lands it in the step loop. The coordinator checks contributions at once, merges one by one, and
    commits a version: outer step and coding of the update.
    """

    up_bytes: int
    down_bytes: int
    encode_s: float
    hold_s: float
    apply_s: float
    land_s: float
    check_s: float
    merge_s: float
    commit_s: float


def global_bytes(layout: Layout, costs: Costs) -> int:
    """Of the whole model in fp32: the initial weights."""
    return math.ceil(fp32().payload_bytes(whole(layout)[0].layout) * costs.left("fp32"))


def load_of(strategy: Strategy, fragment: Fragment, costs: Costs) -> Load:
    """Of a fragment."""
    layout, part = fragment.layout, strategy.part(fragment, 0).layout
    count, own = (sum(spec.num_values for spec in specs.values()) for specs in (layout, part))
    up, down = speed(strategy.up.name), speed(strategy.down.name)
    # A lossy update is decoded by the coordinator too, which moves by what the sites will.
    followed_s = 0.0 if strategy.down.is_exact else down.add_s
    return Load(
        up_bytes=math.ceil(strategy.up.payload_bytes(part) * costs.left(strategy.up.name)),
        down_bytes=math.ceil(strategy.down.payload_bytes(layout) * costs.left(strategy.down.name)),
        encode_s=own * up.encode_s,
        hold_s=own * _COPY_S if strategy.overlap.tau else 0.0,
        apply_s=count * down.add_s,
        land_s=count * _COPY_S,
        check_s=own * _CHECK_S,
        merge_s=own * up.add_s * costs.stands_for,
        commit_s=count * (_OUTER_S + down.encode_s + followed_s),
    )


class Pipe(NamedTuple):
    """One direction of a link: its rate for payloads, once TCP has found it, and round trip."""

    bytes_per_s: float
    rtt_s: float


class WireLink(NamedTuple):
    """Both directions, each with a line of its own."""

    up: Pipe
    down: Pipe


def modelled_link(link: LinkConfig) -> WireLink:
    """The link that a configuration describes, alike both ways; one that loses no packets."""
    rtt_s = link.rtt_ms / 1e3
    rate, pace = link.rate_mbit or math.inf, link.pace_mbit or math.inf
    mbit = min(rate, pace) * MSS_BYTES / PACKET_BYTES * ACK_SHARE
    if link.congestion in ("auto", "bbr"):
        mbit *= 1 - (max(PROBE_S, rtt_s) + rtt_s) / PROBE_EVERY_S
        mbit *= 1.0 if pace < rate else 1 - OVERSHOOT
    pipe = Pipe(max(mbit, 1e-6) * 1e6 / 8, rtt_s)
    return WireLink(pipe, pipe)


def measured_link(found: Measurement) -> WireLink:
    """The link that `fedwan doctor link` measured: goodput is what it saw, theory has no say."""

    def pipe(way: Way) -> Pipe:
        bytes_per_s = max(way.mbit, 1e-3) * ACK_SHARE * 1e6 / 8
        return Pipe(bytes_per_s, found.rtt_ms / 1e3)

    return WireLink(pipe(found.up), pipe(found.down))
