"""Stale contributions: a site that trains from old weights, or whose contributions come late.

Who trained from old weights asks, besides what it learnt, to undo the updates since then: its
contributions have a positive cosine with what the global weights moved by, in every network. Who
merely has other data, or a network that goes astray, does so in one network at most. Late
contributions are counted by the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding
from fedwan.doctor.rules.looking_back import LEAST_BACKWARD

__all__ = ["stale"]

ROUNDS = 3
LEAST_GAP = 0.25
"""Above the other sites': they too turn back where one site's update led astray."""
LEAST_LATER = 2.0
"""Versions by which a site is later than the others."""


def stale(chart: Chart, site: str) -> Iterator[Finding]:
    """See the top of this file."""
    networks = chart.names(site, "backward")
    found = [chart.steady(site, f"backward/{n}", ROUNDS) for n in networks]
    theirs = [chart.typical(site, f"backward/{n}", ROUNDS) for n in networks]
    pairs = [
        (mine, typical)
        for mine, typical in zip(found, theirs, strict=True)
        if mine is not None and typical is not None
    ]
    if pairs and len(pairs) == len(networks):
        if all(m >= max(LEAST_BACKWARD, typical + LEAST_GAP) for m, typical in pairs):
            yield Finding(
                "stale",
                site,
                None,
                chart.version,
                "its contributions ask to undo the last updates (cosine "
                f"{min(m for m, _ in pairs):.2f} or more with them, {max(t for _, t in pairs):.2f} "
                "or less elsewhere)",
                f"see in {site}'s log whether it takes updates over, and start it again: it then "
                "takes the present weights",
            )
            return
    late, typical = (
        chart.steady(site, "staleness", ROUNDS),
        chart.typical(site, "staleness", ROUNDS),
    )
    if late is not None and typical is not None and late >= typical + LEAST_LATER:
        yield Finding(
            "stale",
            site,
            None,
            chart.version,
            f"its contributions come {late:.0f} versions late, the other sites' {typical:.0f}",
            f"run `fedwan doctor link` at {site}; or let it take fewer steps (round.least_steps)",
        )
