"""What coding, merging and copying take, and what a fragment weighs on the wire.

Defaults are one core of the machine of docs/results.md: `benchmarks/codecs.py` for the codecs,
docs/log.md ("codecs in plain torch") for the rest. A calibration replaces those of the codecs by
what it measures on the machine at hand. What packing takes is left out: it goes on beside sending.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedwan.codecs import fp32
from fedwan.fragments import Fragment, whole
from fedwan.state import Layout
from fedwan.strategy import Strategy


class Speed(NamedTuple):
    """Of a codec, seconds per value."""

    encode_s: float
    add_s: float
    """To decode and add."""
    packed: float = 1.0
    """What packing leaves of its bytes (`fedwan.link.framing`)."""


_TABLE = {
    "fp32": (26_991, 10_079, 0.924),
    "bf16": (5_909, 7_143, 0.777),
    "int8": (3_034, 6_777, 0.938),
    "int4": (2_840, 4_845, 0.845),
    "float4": (1_810, 3_885, 0.872),
    "topk2": (588, 3_325, 1.0),
}
"""MB/s of fp32 to encode and to add (docs/results.md); what packing leaves of normal values."""
CODECS = {name: Speed(4e-6 / up, 4e-6 / add, left) for name, (up, add, left) in _TABLE.items()}
_LOGGED_VALUES = 57_182_660
"""Of the model whose times docs/log.md has."""


@dataclass(frozen=True)
class Costs:
    """Seconds per value."""

    codecs: Mapping[str, Speed] = field(default_factory=lambda: CODECS)
    """By name; one that is missing costs as much as the slowest of them."""
    check_s: float = 0.040 / _LOGGED_VALUES
    """To check a contribution: layout, checksum, all values finite."""
    outer_s: float = (0.105 + 0.043 + 0.015) / _LOGGED_VALUES
    """Outer step, commit and moving average, once a round."""
    copy_s: float = 0.3e-9
    """To copy or blend a value that is in memory: 12 bytes at 40 GB/s."""
    stands_for: float = 1.0
    """Sites for which each simulated one stands, whose contributions are merged as well, and whose
    updates are fetched where each makes one."""
    packs: bool = True
    """Whether what travels is packed: the link is slow enough, and nobody forbade it."""

    def left(self, codec: str) -> float:
        """Share of a codec's bytes that travels."""
        return self.speed(codec).packed if self.packs else 1.0

    def speed(self, codec: str) -> Speed:
        """Of a codec."""
        slowest = Speed(*map(max, zip(*self.codecs.values(), strict=True)))
        return self.codecs.get(codec, slowest)


class Load(NamedTuple):
    """Of one fragment: bytes as they travel, and seconds of one party's processor."""

    up_bytes: int
    down_bytes: int
    encode_s: float
    """At the site, beside the steps where the strategy overlaps."""
    hold_s: float
    """At departure, in the step loop; only where the strategy overlaps."""
    apply_s: float
    """At the site, to add the update to the global weights."""
    land_s: float
    """At landing, in the step loop."""
    check_s: float
    """At the coordinator, for each contribution, several at once."""
    merge_s: float
    """At the coordinator, for each contribution, one after the other."""
    commit_s: float
    """At the coordinator, once a version: outer step and coding of the update."""


def global_bytes(layout: Layout, costs: Costs) -> int:
    """Of the whole model in fp32: the initial weights, or what a site that returns is sent."""
    return math.ceil(fp32().payload_bytes(whole(layout)[0].layout) * costs.left("fp32"))


def loads_of(strategy: Strategy, fragments: Sequence[Fragment], costs: Costs) -> list[Load]:
    """By fragment."""
    return [_load(strategy, fragment.layout, costs) for fragment in fragments]


def _load(strategy: Strategy, layout: Layout, costs: Costs) -> Load:
    count = sum(spec.num_values for spec in layout.values())
    up, down = costs.speed(strategy.up.name), costs.speed(strategy.down.name)
    # A lossy update is decoded by the coordinator too, which moves by what the sites will.
    followed_s = 0.0 if strategy.down.is_exact else down.add_s
    # Where every contribution makes a version, those of the sites that one stands for do, too.
    versions = 1.0 if strategy.policy.arrivals_from is None else costs.stands_for
    down_share = versions * costs.left(strategy.down.name)
    down_bytes = math.ceil(strategy.down.payload_bytes(layout) * down_share)
    if versions > 1.0:  # a site that would have to fetch more takes the whole weights
        down_bytes = min(down_bytes, global_bytes(layout, costs))
    return Load(
        up_bytes=math.ceil(strategy.up.payload_bytes(layout) * costs.left(strategy.up.name)),
        down_bytes=down_bytes,
        encode_s=count * up.encode_s,
        hold_s=count * costs.copy_s if strategy.overlap.tau else 0.0,
        apply_s=versions * count * down.add_s,
        land_s=count * costs.copy_s,
        check_s=count * costs.check_s,
        merge_s=count * up.add_s * costs.stands_for,
        commit_s=versions * count * (costs.outer_s + down.encode_s + followed_s),
    )
