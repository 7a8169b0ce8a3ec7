"""A tiny shard, or one of copies: a site that sees few samples again and again learns them.

Told by the shard itself: fewer distinct samples than a twentieth of what the other sites have, or
than 32, or most of them copies. Its loss is then lower than the others', not higher.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding

__all__ = ["small_shard"]

ROUNDS = 3
FEWEST = 32
SMALLEST_SHARE = 0.05
LEAST_DISTINCT = 0.5


def small_shard(chart: Chart, site: str) -> Iterator[Finding]:
    """See the top of this file."""
    samples = chart.steady(site, "shard/samples", ROUNDS)
    distinct = chart.steady(site, "shard/distinct", ROUNDS)
    if samples is None or distinct is None:
        return
    typical = chart.typical(site, "shard/samples", ROUNDS)
    num = samples * distinct
    has_copies = distinct < LEAST_DISTINCT
    if num < FEWEST or has_copies or (typical is not None and num < SMALLEST_SHARE * typical):
        beside = "" if typical is None else f", the other sites have {typical:.0f}"
        yield Finding(
            "small_shard",
            site,
            None,
            chart.version,
            f"its shard has {samples:.0f} samples, {num:.0f} of them distinct{beside}",
            f"check what {site} loads, and that its loader repeats nothing; if that is all it has, "
            "give its data to another site",
        )
