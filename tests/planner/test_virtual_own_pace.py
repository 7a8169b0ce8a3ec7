"""Sites at a pace of their own in virtual time."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from fedwan.config import LinkConfig
from fedwan.planner.costs import Costs
from fedwan.planner.loads import global_bytes
from fedwan.planner.virtual import run_virtually
from fedwan.planner.wire_model import Pipe, WireLink, modelled_link
from fedwan.state import layout_of
from strategies import parameter_server
from tests.planner.models import FAST, LAYOUT, site, strategy_of
from tests.support import SGD, TinyWorkload, build_strategy, run_tiny, tiny_config

UNEQUAL = [site(0.16), site(0.04), site(0.04), site(0.04)]


@pytest.mark.parametrize("name", ["async_diloco", "parameter_server"])
def test_as_many_contributions_as_in_the_real_engine(name: str, tmp_path: Path) -> None:
    inner = {"model": SGD}
    h = 1 if name == "parameter_server" else 4
    if name == "parameter_server":
        strategy = build_strategy(parameter_server, inner, sites=2, h=1)
    else:  # measured speeds differ here, and shall not matter
        strategy = strategy_of(name, 2, h, least_steps=h)
    real = run_tiny(tmp_path, tiny_config(inner=inner, h=h, steps=8 * h), strategy).result
    course = run_virtually(strategy, layout_of(TinyWorkload(inner).networks), [site()] * 2, 8 * h)
    assert not course.stopped and course.dropped == 0
    assert course.contributions == real.totals.contributions == 16


def test_fast_sites_do_not_wait_for_a_slow_one() -> None:
    barrier = run_virtually(strategy_of("diloco", 4, 20), LAYOUT, UNEQUAL, 1000)
    paced = run_virtually(strategy_of("diloco", 4, 20, least_steps=1), LAYOUT, UNEQUAL, 1000)
    arrival = run_virtually(strategy_of("async_diloco", 4, 20), LAYOUT, UNEQUAL, 1000)
    # 1000 steps of the slow one; or 4000 steps at 3 · 25 + 6.25 of them a second.
    assert barrier.wall_s == pytest.approx(160, abs=1)
    for course in (paced, arrival):
        assert course.wall_s == pytest.approx(4000 / 81.25, rel=0.08)
        assert course.num_steps == pytest.approx(4000, rel=0.02)
        shares = [seconds / course.wall_s for seconds in course.compute_s]
        assert min(shares) > 0.9
    assert paced.late == 0 and arrival.late > 100


def test_on_arrival_a_site_fetches_what_all_have_made() -> None:
    strategy = strategy_of("async_diloco", 4, 20, "int4")
    course = run_virtually(strategy, LAYOUT, [site()] * 4, 2000)
    up = course.bytes_up / course.contributions
    assert course.bytes_down / course.contributions == pytest.approx(4 * up, rel=0.1)


def test_who_is_further_behind_than_updates_are_kept_takes_the_weights() -> None:
    strategy = strategy_of("async_diloco", 12, 20, "fp32")
    course = run_virtually(strategy, LAYOUT, [site()] * 12, 2000)
    each = course.bytes_down / course.contributions
    # One update weighs as much as the weights, and not twelve of them are fetched.
    assert each < 3 * global_bytes(LAYOUT, Costs())


def test_a_gradient_waits_for_its_own_bytes_alone() -> None:
    pipe = Pipe(1e9, 0.1)
    course = run_virtually(
        strategy_of("parameter_server", 2, 1), LAYOUT, [site(0.1, WireLink(pipe, pipe))] * 2, 50
    )
    gaps = [
        after - before for before, after in zip(course.marks[0], course.marks[0][1:], strict=False)
    ]
    # Its step, a round trip for its own, and at times another for the other site's update.
    assert 0.2 < statistics.mean(gaps[5:45]) < 0.32


def test_a_site_that_dies_is_not_waited_for_and_returns() -> None:
    sites = [site(), site(), site(0.1, FAST, (20.0, 60.0))]
    course = run_virtually(strategy_of("async_diloco", 3, 10), LAYOUT, sites, 800)
    assert not course.stopped and course.rejoins == 1
    # Two sites take over 40 s of the third's 80.
    assert course.wall_s == pytest.approx(80 + 40 / 3, abs=2)


def test_below_its_quorum_of_live_sites_a_run_stops() -> None:
    strategy = strategy_of("async_diloco", 2, 10, patience_s=5.0)
    sites = [site(), site(0.1, FAST, (20.0, 1e6))]
    course = run_virtually(strategy, LAYOUT, sites, 800)
    assert "contributions after 5" in course.stopped


def test_the_same_run_twice_is_the_same() -> None:
    link = modelled_link(LinkConfig(rate_mbit=100.0, rtt_ms=50.0))
    sites = [site(0.1 + 0.01 * n, link) for n in range(5)]
    courses = [run_virtually(strategy_of("async_diloco", 5, 10), LAYOUT, sites, 300) for _ in "ab"]
    assert courses[0] == courses[1]
