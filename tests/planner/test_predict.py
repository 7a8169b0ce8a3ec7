"""Predictions of single settings, which one is taken, and the table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fedwan.codecs import codec_by_name
from fedwan.config import CodecConfig, RoundConfig, StreamConfig
from fedwan.fragments import whole
from fedwan.planner.candidates import Question, candidates
from fedwan.planner.costs import Costs
from fedwan.planner.predict import (
    ENOUGH,
    Prediction,
    predict,
    rank,
    row_of,
    table_lines,
    why,
    words_of,
)
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
    # However long rounds are, it is found in seconds.
    settings["round"] = RoundConfig(patience_s=1e6)
    long = predicted("h", *CODEC, rate_mbit=0.1, **settings)
    assert 0 < long.utilisation < 0.01


def ranked(asked: Question) -> list[Prediction]:
    cache: dict[object, Any] = {}
    return rank([predict(candidate, asked, cache) for candidate in candidates(asked)], asked)


@pytest.mark.slow
def test_the_fewest_bytes_win_among_those_that_compute_enough() -> None:
    asked = question()
    best, *others = found = ranked(asked)
    assert best.utilisation >= ENOUGH
    assert not best.candidate.strategy.up.has_feedback and best.candidate.strategy.h <= 50
    assert all(
        best.bytes_per_step <= other.bytes_per_step
        for other in others
        if other.utilisation >= ENOUGH and not other.candidate.strategy.up.has_feedback
    )
    text = why(found)
    assert text.startswith("take streaming_diloco, int4, H = 50, 10 fragments, τ = ")
    assert "fewest bytes, 997 kB a step and site" in text
    # No round is longer than it must be.
    enough = [prediction.family for prediction in found if prediction.utilisation >= ENOUGH]
    assert len(set(enough)) == len(enough) > 1


def test_where_nothing_is_enough_the_best_is_named_with_what_limits_it() -> None:
    asked = question(("h", *CODEC), h=20, codec=CodecConfig("fp32", "fp32"))
    text = why(ranked(asked))
    assert "no setting known to train well has its sites compute 95% of the time" in text


def test_what_was_settled_but_not_shown_is_recommended_with_a_doubt_and_bears_a_star() -> None:
    asked = question(("strategy", "h"), strategy="streaming_diloco", h=200)
    found = ranked(asked)
    text = why(found)
    assert text.startswith("if its quality holds (see docs/plan.md), take streaming_diloco")
    assert "known to train well" not in text
    assert all("*" in line for line in table_lines(found, asked)[1:-1])


def test_rows_have_the_keys_that_programs_rely_on() -> None:
    asked = question(("strategy", "h"), strategy="local_sgd", h=50)
    rows = [row_of(prediction, asked) for prediction in ranked(asked)]
    keys = "strategy h codec fragments tau utilisation bytes_per_step wall_s usd is_shown".split()
    assert all(list(row) == keys and row["usd"] is None for row in rows)
    assert {row["codec"] for row in rows} == {"fp32", "bf16", "int8", "int4"}


def test_the_table_has_a_line_for_strategies_that_take_the_same_time() -> None:
    asked = question(("h",), h=20)
    found = ranked(asked)
    lines = table_lines(found, asked)
    assert len(lines) < 1 + len(found)
    assert any(line.startswith("diloco, local_sgd, scaffnew ") for line in lines)
    words = "strategy=streaming_diloco h=20 codec.up=int4 codec.down="
    assert words_of(found[0], asked).startswith(words)
    short = table_lines(found, asked, most=2)
    assert len(short) == 4 and short[-1].endswith(" more: --all")


def test_steps_that_make_no_whole_rounds_are_told_with_the_settings() -> None:
    (found, *_), asked = ranked(asked := question(("steps", "strategy"))), asked
    h = found.candidate.strategy.h
    assert "steps=" not in words_of(found, asked)
    other = replace(asked, num_steps=asked.num_steps * h + 1)
    (found, *_) = ranked(other)
    assert words_of(found, other).endswith(f" steps={(asked.num_steps + 1) * h}")


@pytest.mark.parametrize(("h", "stars"), [(20, 0), (50, 1)])
def test_control_variates_have_shown_their_quality_up_to_20_steps(h: int, stars: int) -> None:
    asked = question(("strategy", "h", *CODEC), strategy="scaffnew", h=h, codec=INT4)
    (line,) = table_lines(ranked(asked), asked)[1:2]
    assert line.count("*") == stars


def test_cost_is_all_sites_bytes_at_the_price() -> None:
    asked = question(("strategy", "h", *CODEC), strategy="diloco", h=50, codec=INT4)
    asked = replace(asked, usd_per_gb=0.05)
    (candidate,) = candidates(asked)
    found = predict(candidate, asked, {})
    row = row_of(found, asked)
    # 4 sites, 10,000 steps, and the initial weights once.
    expected = (4 * 10_000 * found.bytes_per_step + 4 * 57.2e6) / 1e9 * 0.05
    assert row["usd"] == pytest.approx(expected, abs=0.01)
    head, line = table_lines([found], asked)
    assert head.endswith("cost") and line.endswith(f"${row['usd']:.2f}")
