"""What a fragment weighs: bytes on the wire and seconds of work, from the strategy's own codecs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedwan.codecs import fp32
from fedwan.fragments import Fragment, whole
from fedwan.planner.costs import Costs
from fedwan.state import Layout
from fedwan.strategy import Strategy

__all__ = ["Load", "global_bytes", "loads_of"]


class Load(NamedTuple):
    """Of one fragment; seconds are of one party's processor."""

    up_bytes: int
    """Of a contribution, as it travels."""
    down_bytes: int
    """Of an update, as it travels."""
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


def loads_of(strategy: Strategy, fragments: Sequence[Fragment], costs: Costs) -> list[Load]:
    """By fragment."""
    return [_load(strategy, fragment.layout, costs) for fragment in fragments]


def global_bytes(layout: Layout, costs: Costs) -> int:
    """Of the whole model in fp32: the initial weights, or what a site that returns is sent."""
    return math.ceil(fp32().payload_bytes(whole(layout)[0].layout) * costs.left("fp32"))


def _load(strategy: Strategy, layout: Layout, costs: Costs) -> Load:
    count = sum(spec.num_values for spec in layout.values())
    up, down = costs.speed(strategy.up.name), costs.speed(strategy.down.name)
    # A lossy update is decoded by the coordinator too, which moves by what the sites will.
    followed_s = 0.0 if strategy.down.is_exact else down.add_s
    # Where every contribution makes a version, those of the sites that one stands for do, too.
    versions = 1.0 if strategy.policy.arrivals_from is None else costs.stands_for
    up_bytes = math.ceil(strategy.up.payload_bytes(layout) * costs.left(strategy.up.name))
    down_share = versions * costs.left(strategy.down.name)
    down_bytes = math.ceil(strategy.down.payload_bytes(layout) * down_share)
    if versions > 1.0:  # a site that would have to fetch more takes the whole weights
        down_bytes = min(down_bytes, global_bytes(layout, costs))
    return Load(
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        encode_s=count * up.encode_s,
        hold_s=count * costs.copy_s if strategy.overlap.tau else 0.0,
        apply_s=versions * count * down.add_s,
        land_s=count * costs.copy_s,
        check_s=count * costs.check_s,
        merge_s=count * up.add_s * costs.stands_for,
        commit_s=versions * count * (costs.outer_s + down.encode_s + followed_s),
    )
