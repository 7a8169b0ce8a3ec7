"""Seconds per value, and what a fragment weighs."""

from __future__ import annotations

import math

from fedwan.codecs import codec_by_name
from fedwan.fragments import whole
from fedwan.planner.costs import Costs, global_bytes, load_of, speed
from tests.planner.models import LAYOUT, strategy_of

WHOLE = whole(LAYOUT)[0]


def test_bytes_are_the_codecs_own_payloads_less_what_packing_saves() -> None:
    assert speed("new") == speed("topk2")  # as slow as the slowest
    for codec, share in (("int4", 0.845), ("bf16", 0.777), ("fp32", 0.924)):
        strategy = strategy_of("diloco", 2, 20, codec)
        packed, raw = (load_of(strategy, WHOLE, Costs(packs=packs)) for packs in (True, False))
        assert raw.up_bytes == codec_by_name(codec).payload_bytes(LAYOUT)
        assert packed.up_bytes == packed.down_bytes == math.ceil(share * raw.up_bytes)
    assert global_bytes(LAYOUT, Costs()) < 0.93 * global_bytes(LAYOUT, Costs(packs=False))


def test_a_site_holds_a_copy_where_it_goes_on_and_stands_for_others_at_the_merge() -> None:
    strategy = strategy_of("diloco", 2, 20)
    one, ten = (load_of(strategy, WHOLE, Costs(stands_for=n)) for n in (1, 10))
    assert ten.merge_s == 10 * one.merge_s and ten._replace(merge_s=one.merge_s) == one
    streaming = strategy_of("streaming_diloco", 2, 20, stream=(2, 5))
    assert load_of(streaming, WHOLE, Costs()).hold_s > 0 == one.hold_s
