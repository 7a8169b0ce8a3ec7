"""Predictions of single settings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedwan.codecs import codec_by_name
from fedwan.config import CodecConfig, RoundConfig, StreamConfig
from fedwan.fragments import whole
from fedwan.planner.candidates import candidates
from fedwan.planner.costs import Costs
from fedwan.planner.predict import Prediction, predict
from tests.planner.models import question

INT4 = CodecConfig("int4", "int4")
CODEC = ("codec.up", "codec.down")


def predicted(*named: str, rate_mbit: float = 100.0, **settings: Any) -> Prediction:
    asked = question(("strategy", *named), rate_mbit=rate_mbit, **settings)
    (candidate,) = candidates(asked)
    return predict(candidate, asked, {})


def test_bytes_are_a_payload_each_way_in_h_steps() -> None:
    found = predicted("h", *CODEC, strategy="diloco", h=20, codec=INT4)
    layout = whole(question().layout)[0].layout
    payload = math.ceil(Costs().left("int4") * codec_by_name("int4").payload_bytes(layout))
    assert found.bytes_per_step == 2 * payload / 20
    # A longer round uses a slow link better.
    longer = predicted("h", *CODEC, strategy="diloco", h=100, codec=INT4)
    assert found.utilisation < longer.utilisation
    assert found.wall_s > longer.wall_s > 10_000 * 0.1


def test_an_open_tau_is_the_shortest_that_serves() -> None:
    chosen = predicted("h", *CODEC, strategy="streaming_diloco", h=50, codec=INT4)
    tau = chosen.candidate.strategy.overlap.tau
    assert tau < 25 and chosen.utilisation > 0.98
    settled = ("h", "stream.tau", *CODEC)
    shorter = predicted(
        *settled, strategy="streaming_diloco", h=50, codec=INT4, stream=StreamConfig(tau=2)
    )
    assert shorter.utilisation < chosen.utilisation - 0.01


def test_merging_many_sites_takes_the_coordinator_as_long_as_they_are_many() -> None:
    few, many = (
        predicted("h", *CODEC, strategy="diloco", h=50, codec=INT4, sites=n, rate_mbit=10_000.0)
        for n in (4, 400)
    )
    assert many.utilisation < 0.5 < few.utilisation


def test_a_round_beyond_the_policy_s_patience_is_told() -> None:
    # 230 MB at 10 Mbit/s come after more than three minutes.
    settings = {"strategy": "diloco", "h": 10, "round": RoundConfig(patience_s=60.0)}
    found = predicted("h", *CODEC, rate_mbit=10.0, **settings)
    assert found.stopped == "round 1 had 0 of 4 contributions after 60 s"
    assert math.isnan(found.utilisation)


@pytest.mark.parametrize("name", ["sync", "local_sgd"])
def test_runs_that_take_the_same_time_are_simulated_once(name: str) -> None:
    asked = question(("strategy", "h") if name != "sync" else ("strategy",), strategy=name, h=0)
    cache: dict[object, Any] = {}
    first, *_ = candidates(asked)
    assert predict(first, asked, cache).utilisation == predict(first, asked, cache).utilisation
    assert len(cache) == 1
