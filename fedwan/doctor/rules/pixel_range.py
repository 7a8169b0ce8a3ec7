"""A wrong pixel range: 0 to 255 or 0 to 1 where the other sites have -1 to 1.

Images are compared by their whole range, since every site's hold dark and light pixels. Points are
compared by their largest magnitude alone, within a factor of two: shards may lie on different
sides of zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding

__all__ = ["pixel_range"]

ROUNDS = 3
MOST_RATIO = 1.5


def pixel_range(chart: Chart, site: str) -> Iterator[Finding]:
    """See the top of this file."""
    low, high = (chart.steady(site, name, ROUNDS) for name in ("x/low", "x/high"))
    their_low, their_high = (chart.typical(site, name, ROUNDS) for name in ("x/low", "x/high"))
    if low is None or high is None or their_low is None or their_high is None:
        return
    span, their_span = high - low, their_high - their_low
    peak, their_peak = max(-low, high), max(-their_low, their_high)
    is_image = bool(chart.past(site, "x/smooth"))
    if is_image:
        ratios = [span / their_span if their_span else 1.0, (peak or 1.0) / (their_peak or 1.0)]
    else:
        ratios = [((peak or 1.0) / (their_peak or 1.0)) ** 0.5]
    worst = max(max(ratio, 1 / ratio) if ratio > 0 else float("inf") for ratio in ratios)
    if worst > MOST_RATIO:
        yield Finding(
            "range",
            site,
            None,
            chart.version,
            f"its data goes from {low:.3g} to {high:.3g}, that of the other sites from "
            f"{their_low:.3g} to {their_high:.3g}",
            f"scale {site}'s samples as the others': images are in [-1, 1]",
        )
