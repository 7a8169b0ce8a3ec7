"""A learning rate that is not the others'."""

from __future__ import annotations

from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding

__all__ = ["learning_rate"]

ROUNDS = 3
MOST_RATIO = 2.5
"""Sites at a pace of their own may stand at different steps of a warm-up."""


def learning_rate(chart: Chart, site: str) -> Iterator[Finding]:
    """See the top of this file."""
    for network in chart.names(site, "lr"):
        ratio = chart.ratio(site, f"lr/{network}", ROUNDS)
        if ratio is None or 1 / MOST_RATIO <= ratio <= MOST_RATIO:
            continue
        mine, norm = (chart.steady(site, name, 1) for name in (f"lr/{network}", f"norm/{network}"))
        moved = "" if norm is None else f", and it moves {norm:.2g} times as far"
        yield Finding(
            "learning_rate",
            site,
            network,
            chart.version,
            f"its learning rate is {mine:.3g}, {ratio:.3g} times the other sites'{moved}",
            f"start {site} from the run's own configuration: inner.{network}.lr holds for all",
        )
