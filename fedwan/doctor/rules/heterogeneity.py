"""A note: contributions of like norms that hardly agree, as of shards that differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding

__all__ = ["heterogeneity"]

ROUNDS = 5
MOST_COSINE = 0.15
"""Of two sites' contributions, on average."""
MOST_NORM = 1.5


def heterogeneity(chart: Chart) -> Iterator[Finding]:
    """See the top of this file."""
    sites = chart.sites
    if len(sites) < 2:
        return
    for network in chart.names(sites[0], "agreement"):
        agreements = [chart.steady(site, f"agreement/{network}", ROUNDS) for site in sites]
        norms = [chart.steady(site, f"norm/{network}", ROUNDS) for site in sites]
        known = [value for value in agreements if value is not None]
        lengths = [value for value in norms if value is not None]
        if len(known) < len(sites) or any(length > MOST_NORM for length in lengths):
            continue
        agreement = statistics.median(known)
        # Of n vectors of one length whose pairs have a mean cosine of c: (1 + (n - 1) c) / n.
        if agreement < (1 + (len(sites) - 1) * MOST_COSINE) / len(sites):
            yield Finding(
                "heterogeneity",
                None,
                network,
                chart.version,
                f"contributions agree to {agreement:.2f}, where {1 / len(sites):.2f} is orthogonal "
                "and 1 the same, and none is longer than the others",
                "shards differ, or late in a run the steps are mostly noise: no site's fault; if "
                "quality suffers, a smaller h helps, and a GAN that is told the class "
                "(model.conditional=true)",
                is_warning=False,
            )
