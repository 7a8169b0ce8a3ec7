"""Seconds per value, what a fragment weighs, and how long bytes take on a link."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from fedwan.codecs import codec_by_name
from fedwan.config import LinkConfig
from fedwan.errors import ConfigError
from fedwan.fragments import whole
from fedwan.link.measure import Measurement, Way, read_measurement
from fedwan.planner.costs import Costs, global_bytes, load_of, measured_link, modelled_link, speed
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


def mbit(**settings: object) -> float:
    return modelled_link(LinkConfig(**settings)).up.bytes_per_s * 8 / 1e6  # type: ignore[arg-type]


def test_payloads_never_get_the_whole_rate_and_a_pace_saves_what_bbr_loses_at_the_queue() -> None:
    link = {"rate_mbit": 100.0, "rtt_ms": 100.0, "congestion": "bbr"}
    # Headers alone leave 96.5 %.
    assert 80 < (plain := mbit(**link)) < mbit(**link, pace_mbit=99.0) < 96.5
    # A pace above the rate changes nothing.
    assert mbit(**link, pace_mbit=200.0) == plain == mbit(**link | {"congestion": "auto"})
    # A link without limits takes no time.
    assert modelled_link(LinkConfig()).up.bytes_per_s == math.inf


FOUND = Measurement(
    *("coordinator:7444", "s1", 4, 100.0, 105.0),
    *(Way(90.0, "bbr", 0.01), Way(40.0, "cubic", None)),
)


def test_each_way_gets_what_was_measured_less_the_other_one_s_acknowledgements() -> None:
    up, down = measured_link(FOUND)
    assert 0.97 * 90 < up.bytes_per_s * 8 / 1e6 < 90
    assert 0.97 * 40 < down.bytes_per_s * 8 / 1e6 < 40
    assert up.rtt_s == 0.1


def test_what_doctor_wrote_is_read_back_and_anything_else_refused(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(asdict(FOUND)))
    assert measured_link(read_measurement(path)) == measured_link(FOUND)
    odd = (json.dumps(asdict(FOUND) | {"rtt_ms": bad}) for bad in ("1", None, -1.0, 0, 1e999))
    for text in ("", "[]", "{}", '{"advice": null, "up": 3}', "nonsense", *odd):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no measurement; write one with `fedwan doctor l"):
            read_measurement(path)
