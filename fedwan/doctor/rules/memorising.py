"""A network that learns its shard by heart, as a discriminator does that is too strong for it.

Told by samples: it fits the site's training samples better than held-out ones of the same classes,
in seven pairs of ten and more than at the other sites, in most of the last eight rounds or of as
many as there were: among hundreds of rounds, some three in a row look so by chance. What follows at
that site (a generator that gets no useful gradient) is not told apart from it. Where every site's
network does so, as late in long runs on little data, it is noted: no site is odd.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedwan.doctor.chart import PAST, Chart
from fedwan.doctor.finding import Finding

__all__ = ["memorising", "memorising_everywhere"]

ROUNDS = 3
"""That there have to be at least."""
LEAST = 0.7
"""The median of three looks at 32 samples has a standard error of 0.06, of eight 0.04."""
LEAST_GAP = 0.12
"""Above the other sites."""
LEAST_EVERYWHERE = 0.8


def memorising(chart: Chart, site: str) -> Iterator[Finding]:
    """See the top of this file."""
    for network in chart.names(site, "memory"):
        memory = chart.lasting(site, f"memory/{network}", ROUNDS)
        if memory is None or memory < LEAST:
            continue
        typical = chart.typical(site, f"memory/{network}", PAST)
        if typical is not None and memory < typical + LEAST_GAP:
            continue
        beside = "" if typical is None else f" (elsewhere {typical:.0%})"
        samples = chart.steady(site, "shard/samples", 1)
        shard = "" if samples is None else f" of {samples:.0f} samples"
        yield Finding(
            "memorising",
            site,
            network,
            chart.version,
            f"it fits a sample of its shard{shard} better than a held-out one in {memory:.0%} "
            f"of the cases{beside}",
            f"regularise the {network} (model.gamma of a GAN), let it take fewer or smaller steps, "
            f"or give {site} more data",
        )


def memorising_everywhere(chart: Chart) -> Iterator[Finding]:
    """All sites' networks: a note."""
    networks = {network for site in chart.sites for network in chart.names(site, "memory")}
    for network in sorted(networks):
        found = [chart.steady(site, f"memory/{network}", ROUNDS) for site in chart.sites]
        known = [memory for memory in found if memory is not None]
        if len(known) == len(found) > 1 and min(known) >= LEAST_EVERYWHERE:
            yield Finding(
                "memorising",
                None,
                network,
                chart.version,
                "at every site it fits samples of the shard better than held-out ones, in "
                f"{min(known):.0%} of the cases or more",
                f"if quality falls, regularise the {network} (model.gamma of a GAN) or end earlier",
                is_warning=False,
            )
