"""Whole runs in virtual time: against the real engine, what was measured, and with faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedwan.config import LinkConfig
from fedwan.planner.costs import Costs
from fedwan.planner.course import Course
from fedwan.planner.layouts import synthetic_layout
from fedwan.planner.virtual import run_virtually
from fedwan.planner.virtual_site import SiteModel
from fedwan.planner.weather import Season, changing_link, draw_outages
from fedwan.planner.wire_model import Pipe, WireLink, modelled_link
from fedwan.protocol.policy import RoundPolicy
from fedwan.state import layout_of
from strategies import sync
from tests.planner.models import FAST, LAYOUT, site, strategy_of
from tests.support import SGD, TinyWorkload, build_strategy, run_tiny, tiny_config

PIX2PIX = synthetic_layout(57_182_660)


@pytest.mark.parametrize(
    ("name", "h", "stream"),
    [("diloco", 4, None), ("streaming_diloco", 4, (2, 2)), ("sync", 1, None)],
)
def test_rounds_and_contributions_are_those_of_the_real_engine(
    name: str, h: int, stream: tuple[int, int] | None, tmp_path: Path
) -> None:
    strategy = strategy_of(name, 2, h, stream=stream)
    inner = {"model": SGD}
    if name == "sync":
        strategy = build_strategy(sync, inner, sites=2, h=h)  # it mirrors the inner optimisers
    real = run_tiny(tmp_path, tiny_config(inner=inner, h=h, steps=3 * h), strategy)
    course = run_virtually(strategy, layout_of(TinyWorkload(inner).networks), [site()] * 2, 3 * h)
    assert course.contributions == real.result.totals.contributions
    rows = real.rounds("s1")
    assert [(note.fragment, note.version) for note in course.rounds] == [
        (row["fragment"], row["version"]) for row in rows
    ]


# docs/results.md, "Utilisation at pix2pix's size" and "Beside the peers", before packing.
MEASURED = [
    ("streaming_diloco", "int4", 50, 4, (10, 40), {}, 0.964),
    ("streaming_diloco", "int4", 20, 2, (10, 16), {}, 0.747),
    ("streaming_diloco", "int4", 20, 2, (10, 19), {"congestion": "cubic", "pace": 98.5}, 0.803),
    ("streaming_diloco", "fp32", 50, 2, (10, 40), {}, 0.231),
    ("streaming_diloco", "fp32", 50, 2, (10, 40), {"congestion": "cubic", "pace": 98.5}, 0.254),
    ("sync", "fp32", 1, 4, None, {}, 0.0024),
]


@pytest.mark.parametrize(("name", "codec", "h", "sites", "stream", "tcp", "measured"), MEASURED)
def test_published_utilisation_is_met_within_a_tenth(
    name: str,
    codec: str,
    h: int,
    sites: int,
    stream: tuple[int, int] | None,
    tcp: dict[str, object],
    measured: float,
) -> None:
    link = modelled_link(
        LinkConfig(
            rate_mbit=100.0,
            rtt_ms=100.0,
            congestion=str(tcp.get("congestion", "auto")),
            pace_mbit=float(tcp.get("pace", 0.0)),  # type: ignore[arg-type]
        )
    )
    strategy = strategy_of(name, sites, h, codec, stream=stream)
    course = run_virtually(strategy, PIX2PIX, [site(0.1, link)] * sites, 14 * h, Costs(packs=False))
    assert course.utilisation([0.1] * sites, h, 6, 13) == pytest.approx(measured, rel=0.1)


def test_the_slowest_site_sets_the_pace_of_a_barrier() -> None:
    course = run_virtually(strategy_of("diloco", 3, 10), LAYOUT, [site(), site(), site(0.2)], 80)
    assert course.utilisation([0.1, 0.1, 0.2], 10, 1, 7) == pytest.approx((0.5 + 0.5 + 1) / 3, 0.01)


class RecordingPolicy:
    """A policy of the tests' own: the simulator knows of policies nothing but `decide`."""

    def __init__(self, close_at: int, inner: RoundPolicy) -> None:
        self.asked: list[tuple[int, float]] = []
        self._close_at = close_at
        self._inner = inner

    max_staleness = 0
    arrivals_from = None

    def decide(self, num_arrived: int, elapsed_s: float, *more: object) -> str:
        self.asked.append((num_arrived, elapsed_s))
        if num_arrived >= self._close_at:
            return "close"
        return self._inner.decide(num_arrived, elapsed_s, *more)  # type: ignore[arg-type]


def test_the_strategy_s_own_policy_closes_rounds() -> None:
    strategy = strategy_of("diloco", 3, 10)
    policy = RecordingPolicy(2, strategy.policy)
    course = run_virtually(
        strategy._replace(policy=policy),  # type: ignore[arg-type]
        LAYOUT,
        [site(), site(), site(0.11)],
        80,
    )
    assert {note.contributions for note in course.rounds} == {2}
    assert course.dropped == 8 and max(n for n, _ in policy.asked) == 2
    # And in between it is asked as the round loop asks it, every half second.
    assert any(n == 0 and elapsed == pytest.approx(0.5) for n, elapsed in policy.asked)


def test_a_dead_site_is_waited_for_and_then_takes_part_again() -> None:
    sites = [site(), site(0.1, FAST, (2.5, 30.0))]
    course = run_virtually(strategy_of("diloco", 2, 10), LAYOUT, sites, 80)
    assert (len(course.rounds), course.contributions, course.rejoins) == (8, 16, 1)
    assert course.wall_s == pytest.approx(30.0 + 6.0, abs=0.1)


def test_a_quorum_goes_on_without_a_dead_site_after_patience() -> None:
    strategy = strategy_of("diloco", 3, 10, quorum=2, patience_s=5.0)
    sites = [site(), site(), site(0.1, FAST, (2.5, 20.0))]
    course = run_virtually(strategy, LAYOUT, sites, 80)
    assert not course.stopped and course.rejoins >= 1
    assert min(note.contributions for note in course.rounds) == 2
    assert course.rounds[-1].contributions == 3


def test_below_its_quorum_a_run_stops_and_says_so() -> None:
    strategy = strategy_of("diloco", 2, 10, patience_s=5.0)
    course = run_virtually(strategy, LAYOUT, [site(), site(0.1, FAST, (2.5, 1e6))], 80)
    assert course.stopped == "round 3 had 1 of 2 contributions after 5 s"
    assert len(course.rounds) == 2 and course.wall_s < 10


@pytest.mark.parametrize(("max_staleness", "late", "dropped"), [(0, 0, 1), (2, 1, 0)])
def test_with_grace_a_round_does_not_wait_for_a_link_that_stalls(
    max_staleness: int, late: int, dropped: int
) -> None:
    # For two and a half seconds one site's link carries next to nothing.
    stalled = WireLink(Pipe(4e3, 0.0), Pipe(1e9, 0.0))
    seasons = (Season(0.0, FAST), Season(9.5, stalled), Season(12.5, FAST))
    sites = [site(), site(), site(), SiteModel(0.1, seasons)]
    strategy = strategy_of("diloco", 4, 10, quorum=3, grace=3.0, max_staleness=max_staleness)
    course = run_virtually(strategy, LAYOUT, sites, 400)
    short = [note for note in course.rounds if note.contributions < 4]
    # The median of the past is a second; the loop looks at the clock every half a second.
    assert short and all(note.closed_s - note.began_s < 1.7 for note in short)
    assert (course.late, course.dropped, course.rejoins) == (late, dropped, 1)
    assert course.wall_s < 42.5
    in_time = sum(note.contributions for note in course.rounds)
    assert course.contributions == in_time + late == 40 * 4 - len(short) + late


def unruly(num: int, seed: int, horizon_s: float) -> Sequence[SiteModel]:
    link = modelled_link(LinkConfig(rate_mbit=1000.0, rtt_ms=50.0))
    draw = random.Random(seed)
    return [
        SiteModel(
            draw.uniform(0.09, 0.11),
            changing_link(seed, index, link, horizon_s, mean_s=100.0, least=0.3),
            draw_outages(seed, index, horizon_s, mean_up_s=1000.0, mean_down_s=20.0),
        )
        for index in range(num)
    ]


def unruly_run(seed: int, stream: tuple[int, int] | None, num: int = 100) -> Course:
    name = "streaming_diloco" if stream else "diloco"
    strategy = strategy_of(name, num, 20, "int4", quorum=num // 2, patience_s=10.0, stream=stream)
    return run_virtually(strategy, LAYOUT, unruly(num, seed, 600.0), 100 * 20)


@pytest.mark.parametrize("stream", [None, (2, 10)], ids=["whole", "streaming"])
def test_a_hundred_sites_come_through_a_hundred_rounds_of_faults(
    stream: tuple[int, int] | None,
) -> None:
    course = unruly_run(0, stream)
    count = stream[0] if stream else 1
    assert not course.stopped and len(course.rounds) == 100 * count
    assert [note.version for note in course.rounds if note.fragment == 0] == list(range(1, 101))
    assert course.rejoins > 10
    assert 0.8 < course.contributions / (100 * 100 * count) <= 1.0
    assert all(note.began_s <= note.closed_s for note in course.rounds)


def test_the_same_seed_is_the_same_run() -> None:
    assert unruly_run(1, None, 20).rounds == unruly_run(1, None, 20).rounds
    assert unruly_run(1, None, 20).rounds != unruly_run(2, None, 20).rounds
