"""Corrupt data: images whose neighbouring pixels know nothing of each other.

The correlation of neighbours does not depend on range or contrast, so that noise and a wrong pixel
range are told apart; real images have 0.5 to 0.99, noise 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding

__all__ = ["noise"]

ROUNDS = 3
MOST = 0.25
SHARE = 0.4
"""Of what the other sites have; alone, `MOST` is taken to be noise only close to 0."""
ALONE = 0.05


def noise(chart: Chart, site: str) -> Iterator[Finding]:
    """See the top of this file."""
    smooth = chart.steady(site, "x/smooth", ROUNDS)
    if smooth is None:
        return
    typical = chart.typical(site, "x/smooth", ROUNDS)
    most = ALONE if typical is None else min(MOST, SHARE * typical)
    if abs(smooth) < most:
        beside = "" if typical is None else f", of the other sites {typical:.2f}"
        yield Finding(
            "noise",
            site,
            None,
            chart.version,
            f"neighbouring pixels of its data have a correlation of {smooth:.2f}{beside}",
            f"look at some of {site}'s samples as its workload gets them: files that are damaged, "
            "or read in the wrong shape or order, look like noise",
        )
