"""Mode collapse: a generator whose samples are nearly alike.

Told by samples: their mean distance over that of real ones, which is near 1 in a healthy run and
small before training: a site whose latest samples are diverse has left that behind. So a site is
told by the others, once theirs are diverse, and the run as a whole only after its samples were
diverse, or many rounds: of images that are made of other images only after they were, since these
take hundreds of steps to get there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding
from fedwan.doctor.rules.looking_back import looks_back

__all__ = ["collapse", "collapse_everywhere"]

ROUNDS = 4
MOST = 0.45
SHARE = 0.6
"""Of the other sites' spread."""
LATE = 8
"""Rounds in a row with little spread anywhere, where it may only be the beginning."""
WHAT = ("spread", "variety")
"""Figures of samples from noise, and of images made of others."""
DROP = 0.4
"""Of the spread that there was."""


def collapse(chart: Chart, site: str) -> Iterator[Finding]:
    """One site's generator."""
    names = [(f"{what}/{network}", network) for what in WHAT for network in chart.names(site, what)]
    for name, network in names:
        spread = chart.steady(site, name, ROUNDS)
        typical = chart.typical(site, name, ROUNDS)
        elsewhere = chart.typical(site, name, 1)
        if spread is None or typical is None or looks_back(chart, site, network):
            continue
        if elsewhere is None or elsewhere < MOST:
            continue  # all may be at their beginning
        latest = chart.past(site, name)[-1]
        if max(spread, latest) < MOST and spread < SHARE * typical:
            yield Finding(
                "collapse",
                site,
                network,
                chart.version,
                f"its samples spread {spread:.2f} times as far as real ones, "
                f"elsewhere {typical:.2f}",
                f"compare {site}'s losses and settings with the others'; a lower "
                f"inner.{network}.lr, a penalty on the discriminator or a smaller h hold it",
            )


def collapse_everywhere(chart: Chart) -> Iterator[Finding]:
    """All sites' generators."""
    names = {
        (what, network)
        for what in WHAT
        for site in chart.sites
        for network in chart.names(site, what)
    }
    for what, network in sorted(names):
        pasts = [chart.past(site, f"{what}/{network}") for site in chart.sites]
        rows = list(zip(*(past[-LATE:] for past in pasts if past), strict=False))
        spreads = [statistics.median(row) for row in rows]
        if len(spreads) < LATE:
            continue
        now = statistics.median(spreads[-ROUNDS:])
        never = what == "spread" and max(spreads) < MOST
        if now < MOST and (never or now < DROP * max(spreads[:-ROUNDS])):
            yield Finding(
                "collapse",
                None,
                network,
                chart.version,
                f"samples of every site spread {now:.2f} times as far as real ones",
                f"lower inner.{network}.lr or h, raise the discriminator's penalty, and for shards "
                "of different classes let a GAN be told the class (model.conditional=true)",
            )
