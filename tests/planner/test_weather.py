"""Outages and changes of rate, drawn from a seed."""

from __future__ import annotations

from fedwan.planner.weather import changing_link, draw_outages
from tests.planner.models import FAST


def test_the_same_seed_draws_the_same_outages_and_each_site_its_own() -> None:
    first = draw_outages(0, 3, 1e5, 1000.0, 100.0)
    assert first == draw_outages(0, 3, 1e5, 1000.0, 100.0)
    assert first != draw_outages(0, 4, 1e5, 1000.0, 100.0)
    assert first != draw_outages(1, 3, 1e5, 1000.0, 100.0)
    assert 50 < len(first) < 150


def test_outages_do_not_overlap_and_begin_before_the_horizon() -> None:
    outages = draw_outages(0, 0, 1e5, 100.0, 100.0)
    assert all(a.from_s < a.until_s <= b.from_s for a, b in zip(outages, outages[1:], strict=False))
    assert outages[-1].from_s < 1e5


def test_a_changing_link_begins_at_its_best_and_stays_above_its_least() -> None:
    seasons = changing_link(0, 0, FAST, 1e4, 100.0, 0.5)
    assert seasons[0].from_s == 0.0 and seasons[0].link == FAST
    rates = [season.link.up.bytes_per_s / FAST.up.bytes_per_s for season in seasons[1:]]
    assert len(rates) > 50 and all(0.5 <= rate <= 1.0 for rate in rates)
    assert seasons == changing_link(0, 0, FAST, 1e4, 100.0, 0.5)
