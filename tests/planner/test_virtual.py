"""Whole runs in virtual time: against the real engine, and what was measured."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from fedwan.config import LinkConfig
from fedwan.planner.candidates import synthetic_layout
from fedwan.planner.costs import Costs, global_bytes
from fedwan.planner.links import Pipe, WireLink, modelled_link
from fedwan.state import layout_of
from strategies import parameter_server, sync
from tests.planner.models import LAYOUT, course, strategy_of
from tests.support import SGD, TinyWorkload, build_strategy, run_tiny, tiny_config

PIX2PIX = synthetic_layout(57_182_660)
TINY = layout_of(TinyWorkload({"model": SGD}).networks)


@pytest.mark.parametrize(
    ("name", "h", "stream"),
    [
        ("diloco", 4, None),
        ("streaming_diloco", 4, (2, 2)),
        ("sync", 1, None),
        ("async_diloco", 4, None),
        ("parameter_server", 1, None),
    ],
)
def test_rounds_and_contributions_are_those_of_the_real_engine(
    name: str, h: int, stream: tuple[int, int] | None, tmp_path: Path
) -> None:
    inner = {"model": SGD}
    if h == 1:  # these mirror the inner optimisers
        recipe = {"sync": sync, "parameter_server": parameter_server}[name]
        strategy = build_strategy(recipe, inner, sites=2, h=h)
    else:  # measured speeds differ here, and shall not matter
        settings = {"least_steps": h} if name == "async_diloco" else {}
        strategy = strategy_of(name, 2, h, stream=stream, **settings)
    real = run_tiny(tmp_path, tiny_config(inner=inner, h=h, steps=4 * h), strategy)
    found = course(strategy, 2, 4 * h, layout=TINY)
    assert not found.stopped
    assert found.contributions == real.result.totals.contributions
    if strategy.clock != "samples":  # at a pace of their own sites take turns as it comes
        assert found.rounds == [(row["fragment"], row["version"]) for row in real.rounds("s1")]


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
    found = course(strategy, sites, 14 * h, link, PIX2PIX, packs=False)
    assert found.utilisation(h * 0.1, 6, 13) == pytest.approx(measured, rel=0.1)


def test_on_arrival_a_site_fetches_what_all_have_made() -> None:
    found = course(strategy_of("async_diloco", 4, 20, "int4"), 4, 2000)
    assert found.bytes_down / found.bytes_up == pytest.approx(4, rel=0.1)


def test_who_is_further_behind_than_updates_are_kept_takes_the_weights() -> None:
    found = course(strategy_of("async_diloco", 12, 20, "fp32"), 12, 2000)
    # One update weighs as much as the weights, and not twelve of them are fetched.
    assert found.bytes_down / found.contributions < 3 * global_bytes(LAYOUT, Costs())


def test_a_gradient_waits_for_its_own_bytes_alone() -> None:
    pipe = Pipe(1e9, 0.1)
    found = course(strategy_of("parameter_server", 2, 1), 2, 50, WireLink(pipe, pipe))
    marks = found.marks[0]
    gaps = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    # Its step, a round trip for its own, and at times another for the other site's update.
    assert 0.2 < statistics.mean(gaps[5:45]) < 0.32
