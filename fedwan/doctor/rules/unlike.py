"""A site that pulls against all others, for no reason that another rule knows.

Shards that differ make contributions of like norms that are orthogonal; this is for one that is
longer than the others and points away from them, round after round. It is told, not dropped: if it
has classes that the others lack, they would go with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding

__all__ = ["unlike"]

ROUNDS = 5
LEAST_NORM = 1.5
MOST_COSINE = -0.15


def unlike(chart: Chart, site: str) -> Iterator[Finding]:
    """See the top of this file."""
    for network in chart.names(site, "norm"):
        norms = chart.past(site, f"norm/{network}")[-ROUNDS:]
        cosines = chart.past(site, f"cosine/{network}")[-ROUNDS:]
        if len(norms) < ROUNDS or len(cosines) < ROUNDS:
            continue
        if min(norms) > LEAST_NORM and max(cosines) < MOST_COSINE:
            yield Finding(
                "unlike",
                site,
                network,
                chart.version,
                f"its contributions are {norms[-1]:.2g} times as long as the other sites' and "
                f"point away from them (cosine {cosines[-1]:.2f})",
                f"compare {site}'s data, code and settings with another site's; other classes "
                "alone do not do this",
            )
