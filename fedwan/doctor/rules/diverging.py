"""Divergence: a network whose loss or steps grow out of all proportion.

At one site: its loss is three times the other sites' and above what any of theirs began with (a
shard may be harder than others, and its loss fall all the same), or its contributions are four
times as long, round after round. Where a discriminator at the same site took far longer steps than
elsewhere, it is that one which overpowers the other network. Everywhere: losses that are not
finite, or ten times what they were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from fedwan.doctor.chart import PAST, Chart
from fedwan.doctor.finding import Finding
from fedwan.doctor.rules.looking_back import looks_back

__all__ = ["diverging", "diverging_everywhere", "overpowering"]

ROUNDS = 3
MOST_LOSS = 3.0
MOST_NORM = 4.0
LONG_STEPS = 1.6
LEAST_SEPARATION = 0.98
GROWTH = 10.0
LEAST_LOSS = 0.5
"""What smaller losses count as: those of a GAN may begin near 0."""


def diverging(chart: Chart, site: str) -> Iterator[Finding]:
    """One site's network."""
    for network in chart.names(site, "norm"):
        if looks_back(chart, site, network):
            continue
        loss = chart.past(site, f"loss/{network}")[-ROUNDS:]
        typical = chart.typical(site, f"loss/{network}", ROUNDS)
        if len(loss) == ROUNDS and typical is not None and math.isfinite(typical) and typical > 0:
            if min(loss) > max(MOST_LOSS * typical, chart.began(site, f"loss/{network}")):
                now = "not finite" if math.isinf(loss[-1]) else f"{loss[-1]:.3g}"
                yield _finding(chart, site, network, f"its loss is {now}, elsewhere {typical:.3g}")
                continue
        norms = chart.past(site, f"norm/{network}")[-ROUNDS:]
        if len(norms) == ROUNDS and min(norms) > MOST_NORM:
            yield _finding(
                chart,
                site,
                network,
                f"its contributions are {norms[-1]:.2g} times as long as the other sites'",
            )


def _finding(chart: Chart, site: str, network: str, why: str) -> Finding:
    return Finding(
        "diverging",
        site,
        network,
        chart.version,
        why,
        f"check the sign and the weights of the {network}'s loss at {site}; clip its gradients "
        f"(inner.{network}.clip_norm) or lower inner.{network}.lr",
    )


def overpowering(chart: Chart, site: str) -> Iterator[Finding]:
    """One site's discriminator, which leaves its generator nothing to learn from."""
    for network in chart.names(site, "separation"):
        past = chart.past(site, f"separation/{network}")[-ROUNDS:]
        typical = chart.typical(site, f"separation/{network}", ROUNDS)
        norm = chart.steady(site, f"norm/{network}", ROUNDS)
        if len(past) < ROUNDS or typical is None or norm is None:
            continue
        if min(past) >= LEAST_SEPARATION > typical and norm > LONG_STEPS:
            yield Finding(
                "overpowering",
                site,
                network,
                chart.version,
                f"it tells real from generated samples in {min(past):.0%} of the cases (elsewhere "
                f"{typical:.0%}) and moves {norm:.2g} times as far as elsewhere",
                f"lower inner.{network}.lr or its number of steps at {site}, or raise its penalty "
                "(model.gamma)",
            )


def diverging_everywhere(chart: Chart) -> Iterator[Finding]:
    """All sites' networks."""
    losses = {name for site in chart.sites for name in chart.names(site, "loss")}
    networks = {name for site in chart.sites for name in chart.names(site, "lr")}
    # Penalties and the like may grow as they please.
    for name in sorted(losses & networks or losses):
        pasts = [chart.past(site, f"loss/{name}") for site in chart.sites]
        full = [past for past in pasts if len(past) == PAST]
        if len(full) < len(pasts) or not full:
            continue
        before = statistics.median(min(abs(x) for x in past[:-ROUNDS]) for past in full)
        now = statistics.median(min(abs(x) for x in past[-ROUNDS:]) for past in full)
        if not math.isfinite(now) or now > GROWTH * max(before, LEAST_LOSS):
            yield Finding(
                "diverging",
                None,
                name,
                chart.version,
                f"the loss {name!r} has grown from {before:.3g} to {now:.3g} at most sites",
                "lower the inner learning rate or the outer one (outer.NETWORK.lr, "
                "outer.NETWORK.momentum), clip gradients, or take a smaller h",
            )
