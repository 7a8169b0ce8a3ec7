"""Whole runs in virtual time: against the real engine, and what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.config import LinkConfig
from fedwan.planner.candidates import synthetic_layout
from fedwan.planner.costs import modelled_link
from fedwan.state import layout_of
from strategies import sync
from tests.planner.models import course, strategy_of
from tests.support import SGD, TinyWorkload, build_strategy, run_tiny, tiny_config

PIX2PIX = synthetic_layout(57_182_660)
TINY = layout_of(TinyWorkload({"model": SGD}).networks)


@pytest.mark.parametrize(
    ("name", "h", "stream"),
    [("diloco", 4, None), ("streaming_diloco", 4, (2, 2)), ("sync", 1, None)],
)
def test_rounds_and_contributions_are_those_of_the_real_engine(
    name: str, h: int, stream: tuple[int, int] | None, tmp_path: Path
) -> None:
    inner = {"model": SGD}
    if name == "sync":  # it mirrors the inner optimisers
        strategy = build_strategy(sync, inner, sites=2, h=h)
    else:
        strategy = strategy_of(name, 2, h, stream=stream)
    real = run_tiny(tmp_path, tiny_config(inner=inner, h=h, steps=4 * h), strategy)
    found = course(strategy, 2, 4 * h, layout=TINY)
    assert not found.stopped
    assert found.contributions == real.result.totals.contributions
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
