"""The doctor's rules, causes before what follows from them.

A rule is a function of the chart, and of a site, to (network or None, why, mend). Of one site only
what stands highest is told: whoever has the wrong pixels will also have long steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

from fedwan.doctor.chart import PAST, Chart

__all__ = ["LEAST_DISTINCT", "RUN_RULES", "SITE_RULES"]

Told = Iterator[tuple[str | None, str, str]]

LEAST_DISTINCT = 0.5
"""Share of a shard's samples that are no copies."""
_ROUNDS = 3
_LEAST_BACKWARD = 0.25
"""Cosine with what the last updates moved by, from which on a contribution asks to undo them."""


def small_shard(chart: Chart, site: str) -> Told:
    """Fewer distinct samples than 32, or than a twentieth of the others', or copies."""
    samples, typical = chart.both(site, "shard/samples", _ROUNDS)
    distinct = chart.steady(site, "shard/distinct", _ROUNDS)
    if samples is None or distinct is None:
        return
    num = samples * distinct
    if num < 32 or distinct < LEAST_DISTINCT or (typical is not None and num < 0.05 * typical):
        beside = "" if typical is None else f", the other sites have {typical:.0f}"
        yield (
            None,
            f"its shard has {samples:.0f} samples, {num:.0f} of them distinct{beside}",
            f"check what {site} loads, and that its loader repeats nothing; if that is all it has, "
            "give its data to another site",
        )


def noise(chart: Chart, site: str) -> Told:
    """Images whose neighbouring pixels know nothing of each other, whatever their range.

    Real ones have a correlation of 0.5 to 0.99. Alone, only what is close to 0 is noise.
    """
    smooth, typical = chart.both(site, "x/smooth", _ROUNDS)
    if smooth is None:
        return
    if abs(smooth) < (0.05 if typical is None else min(0.25, 0.4 * typical)):
        beside = "" if typical is None else f", of the other sites {typical:.2f}"
        yield (
            None,
            f"neighbouring pixels of its data have a correlation of {smooth:.2f}{beside}",
            f"look at some of {site}'s samples as its workload gets them: files that are damaged, "
            "or read in the wrong shape or order, look like noise",
        )


def pixel_range(chart: Chart, site: str) -> Told:
    """A wrong pixel range: 0 to 255 or 0 to 1 where the other sites have -1 to 1.

    Points are compared by their largest magnitude alone, within a factor of two: shards may lie on
    different sides of zero.
    """
    low, their_low = chart.both(site, "x/low", _ROUNDS)
    high, their_high = chart.both(site, "x/high", _ROUNDS)
    if low is None or high is None or their_low is None or their_high is None:
        return
    peak, their_peak = max(-low, high) or 1.0, max(-their_low, their_high) or 1.0
    ratios = [(peak / their_peak) ** 0.5]
    if chart.past(site, "x/smooth"):
        their_span = their_high - their_low
        ratios = [(high - low) / their_span if their_span else 1.0, peak / their_peak]
    if max(max(ratio, 1 / ratio) if ratio > 0 else math.inf for ratio in ratios) > 1.5:
        yield (
            None,
            f"its data goes from {low:.3g} to {high:.3g}, that of the other sites from "
            f"{their_low:.3g} to {their_high:.3g}",
            f"scale {site}'s samples as the others': images are in [-1, 1]",
        )


def learning_rate(chart: Chart, site: str) -> Told:
    """A learning rate that is not the others', whose pace may put them elsewhere in a warm-up."""
    for network in chart.names(site, "lr"):
        rate, typical = chart.both(site, f"lr/{network}", _ROUNDS)
        if rate is None or typical is None or rate <= 0 or not 0 < typical < math.inf:
            continue
        ratio = rate / typical
        if 1 / 2.5 <= ratio <= 2.5:
            continue
        mine, norm = (chart.steady(site, name, 1) for name in (f"lr/{network}", f"norm/{network}"))
        moved = "" if norm is None else f", and it moves {norm:.2g} times as far"
        yield (
            network,
            f"its learning rate is {mine:.3g}, {ratio:.3g} times the other sites'{moved}",
            f"start {site} from the run's own configuration: inner.{network}.lr holds for all",
        )


def stale(chart: Chart, site: str) -> Told:
    """A site that trains from old weights, or whose contributions come late.

    The former asks to undo the updates since then, in every network and more than others do, who
    too turn back where one site led astray. Who merely has other data does so in one network at
    most.
    """
    names = [f"backward/{network}" for network in chart.names(site, "backward")]
    pairs = [chart.both(site, name, _ROUNDS) for name in names]
    known = [(mine, typical) for mine, typical in pairs if mine is not None and typical is not None]
    if known and len(known) == len(pairs):
        if all(mine >= max(_LEAST_BACKWARD, typical + 0.25) for mine, typical in known):
            least, most = min(mine for mine, _ in known), max(typical for _, typical in known)
            yield (
                None,
                f"its contributions ask to undo the last updates (cosine {least:.2f} or more with "
                f"them, {most:.2f} or less elsewhere)",
                f"see in {site}'s log whether it takes updates over, and start it again: it then "
                "takes the present weights",
            )
            return
    late, theirs = chart.both(site, "staleness", _ROUNDS)
    if late is not None and theirs is not None and late >= theirs + 2:
        yield (
            None,
            f"its contributions come {late:.0f} versions late, the other sites' {theirs:.0f}",
            f"run `fedwan doctor link` at {site}; or let it take fewer steps (round.least_steps)",
        )


def memorising(chart: Chart, site: str) -> Told:
    """A network that learns its shard by heart: it fits training samples better than held-out ones.

    In seven pairs of ten and more than elsewhere, in most of the last eight rounds: among hundreds,
    some three in a row look so by chance. The median of three looks has a standard error of 0.06.
    """
    for network in chart.names(site, "memory"):
        memory = chart.steady(site, f"memory/{network}", _ROUNDS, over=PAST)
        typical = chart.typical(site, f"memory/{network}", PAST)
        if memory is None or memory < max(0.7, 0 if typical is None else typical + 0.12):
            continue
        beside = "" if typical is None else f" (elsewhere {typical:.0%})"
        samples = chart.steady(site, "shard/samples", 1)
        shard = "" if samples is None else f" of {samples:.0f} samples"
        yield (
            network,
            f"it fits a sample of its shard{shard} better than a held-out one in {memory:.0%} "
            f"of the cases{beside}",
            f"regularise the {network} (model.gamma of a GAN), let it take fewer or smaller steps, "
            f"or give {site} more data",
        )


def overpowering(chart: Chart, site: str) -> Told:
    """A discriminator that leaves its generator nothing to learn from, by far longer steps."""
    for network in chart.names(site, "separation"):
        past = chart.past(site, f"separation/{network}", _ROUNDS)
        typical = chart.typical(site, f"separation/{network}", _ROUNDS)
        norm = chart.steady(site, f"norm/{network}", _ROUNDS)
        if len(past) < _ROUNDS or typical is None or norm is None:
            continue
        if min(past) >= 0.98 > typical and norm > 1.6:
            yield (
                network,
                f"it tells real from generated samples in {min(past):.0%} of the cases (elsewhere "
                f"{typical:.0%}) and moves {norm:.2g} times as far as elsewhere",
                f"lower inner.{network}.lr or its number of steps at {site}, or raise its penalty "
                "(model.gamma)",
            )


def diverging(chart: Chart, site: str) -> Told:
    """A loss three times the others' and above what any of theirs began with, or long steps.

    A shard may be harder than others, and its loss fall all the same.
    """
    for network in chart.names(site, "norm"):
        if _looks_back(chart, site, network):
            continue
        name = f"loss/{network}"
        loss, norms = (chart.past(site, n, _ROUNDS) for n in (name, f"norm/{network}"))
        typical = chart.typical(site, name, _ROUNDS) or 0.0
        least = max(3 * typical, chart.began(site, name))
        if len(loss) == _ROUNDS and 0 < typical < math.inf and min(loss) > least:
            now = "not finite" if math.isinf(loss[-1]) else f"{loss[-1]:.3g}"
            why = f"its loss is {now}, elsewhere {typical:.3g}"
        elif len(norms) == _ROUNDS and min(norms) > 4:
            why = f"its contributions are {norms[-1]:.2g} times as long as the other sites'"
        else:
            continue
        yield (
            network,
            why,
            f"check the sign and the weights of the {network}'s loss at {site}; clip its gradients "
            f"(inner.{network}.clip_norm) or lower inner.{network}.lr",
        )


_LITTLE_SPREAD = 0.45
"""Mean distance of generated samples over that of real ones: near 1 in a healthy run."""
_COLLAPSE_ROUNDS = 4


def collapse(chart: Chart, site: str) -> Told:
    """A generator whose samples are nearly alike, once those of the other sites are diverse.

    Before training all are alike; a site whose latest samples are diverse has left that behind.
    """
    # Of samples from noise, and of images made of others.
    for what, network in [(w, n) for w in ("spread", "variety") for n in chart.names(site, w)]:
        name = f"{what}/{network}"
        spread, typical = chart.both(site, name, _COLLAPSE_ROUNDS)
        if spread is None or typical is None or _looks_back(chart, site, network):
            continue
        if (chart.typical(site, name, 1) or 0.0) < _LITTLE_SPREAD:
            continue  # all may be at their beginning
        if max(spread, chart.past(site, name)[-1]) < _LITTLE_SPREAD and spread < 0.6 * typical:
            yield (
                network,
                f"its samples spread {spread:.2f} times as far as real ones, "
                f"elsewhere {typical:.2f}",
                f"compare {site}'s losses and settings with the others'; a lower "
                f"inner.{network}.lr, a penalty on the discriminator or a smaller h hold it",
            )


def unlike(chart: Chart, site: str) -> Told:
    """A site that pulls against all others, for no reason that another rule knows.

    Shards that differ make contributions of like norms that are orthogonal; these are longer.
    """
    for network in chart.names(site, "norm"):
        norms, cosines = (chart.past(site, f"{what}/{network}", 5) for what in ("norm", "cosine"))
        if len(norms) == len(cosines) == 5 and min(norms) > 1.5 and max(cosines) < -0.15:
            yield (
                network,
                f"its contributions are {norms[-1]:.2g} times as long as the other sites' and "
                f"point away from them (cosine {cosines[-1]:.2f})",
                f"compare {site}'s data, code and settings with another site's; other classes "
                "alone do not do this",
            )


def _looks_back(chart: Chart, site: str, network: str) -> bool:
    """Whether a network only comes from old weights, with losses from before training."""
    backward = chart.steady(site, f"backward/{network}", 2)
    return backward is not None and backward >= _LEAST_BACKWARD


def diverging_everywhere(chart: Chart) -> Told:
    """Losses of all sites that are not finite, or ten times what they were."""
    losses = set(chart.everywhere("loss"))
    # Penalties and the like may grow as they please.
    for name in sorted(losses & set(chart.everywhere("lr")) or losses):
        pasts = [chart.past(site, f"loss/{name}") for site in chart.sites]
        if any(len(past) < PAST for past in pasts):
            continue
        before = statistics.median(min(map(abs, past[:-_ROUNDS])) for past in pasts)
        now = statistics.median(min(map(abs, past[-_ROUNDS:])) for past in pasts)
        # Losses of a GAN may begin near 0.
        if not math.isfinite(now) or now > 10 * max(before, 0.5):
            yield (
                name,
                f"the loss {name!r} has grown from {before:.3g} to {now:.3g} at most sites",
                "lower the inner learning rate or the outer one (outer.NETWORK.lr, "
                "outer.NETWORK.momentum), clip gradients, or take a smaller h",
            )


def collapse_everywhere(chart: Chart) -> Told:
    """All generators: after samples were diverse, or if they never are but for images of others."""
    for what, network in [(w, n) for w in ("spread", "variety") for n in chart.everywhere(w)]:
        pasts = [chart.past(site, f"{what}/{network}") for site in chart.sites]
        spreads = [statistics.median(row) for row in zip(*filter(None, pasts), strict=False)]
        if len(spreads) < PAST:
            continue
        now = statistics.median(spreads[-_COLLAPSE_ROUNDS:])
        never = what == "spread" and max(spreads) < _LITTLE_SPREAD
        if now < _LITTLE_SPREAD and (never or now < 0.4 * max(spreads[:-_COLLAPSE_ROUNDS])):
            yield (
                network,
                f"samples of every site spread {now:.2f} times as far as real ones",
                f"lower inner.{network}.lr or h, raise the discriminator's penalty, and for shards "
                "of different classes let a GAN be told the class (model.conditional=true)",
            )


def memorising_everywhere(chart: Chart) -> Told:
    """All sites' networks, as late in long runs on little data: no site is odd."""
    for network in chart.everywhere("memory"):
        found = [chart.steady(site, f"memory/{network}", _ROUNDS) for site in chart.sites]
        known = [memory for memory in found if memory is not None]
        if len(known) == len(found) > 1 and min(known) >= 0.8:
            yield (
                network,
                "at every site it fits samples of the shard better than held-out ones, in "
                f"{min(known):.0%} of the cases or more",
                f"if quality falls, regularise the {network} (model.gamma of a GAN) or end earlier",
            )


def heterogeneity(chart: Chart) -> Told:
    """Contributions of like norms that hardly agree, as of shards that differ."""
    sites = chart.sites
    if len(sites) < 2:
        return
    for network in chart.names(sites[0], "agreement"):
        agreements = [chart.steady(site, f"agreement/{network}", 5) for site in sites]
        norms = [chart.steady(site, f"norm/{network}", 5) for site in sites]
        known = [value for value in agreements if value is not None]
        if len(known) < len(sites) or any(norm is not None and norm > 1.5 for norm in norms):
            continue
        agreement = statistics.median(known)
        # Of n vectors of one length whose pairs have a mean cosine of c: (1 + (n - 1) c) / n.
        if agreement < (1 + (len(sites) - 1) * 0.15) / len(sites):
            yield (
                network,
                f"contributions agree to {agreement:.2f}, where {1 / len(sites):.2f} is orthogonal "
                "and 1 the same, and none is longer than the others",
                "shards differ, or late in a run the steps are mostly noise: no site's fault; if "
                "quality suffers, a smaller h helps, and a GAN that is told the class "
                "(model.conditional=true)",
            )


SITE_RULES: dict[str, Callable[[Chart, str], Told]] = {
    "small_shard": small_shard,
    "noise": noise,
    "range": pixel_range,
    "learning_rate": learning_rate,
    "stale": stale,
    "memorising": memorising,
    "overpowering": overpowering,
    "diverging": diverging,
    "collapse": collapse,
    "unlike": unlike,
}
"""By kind of finding, of one site, the highest first."""


RUN_RULES: tuple[tuple[str, Callable[[Chart], Told], bool], ...] = (
    ("diverging", diverging_everywhere, True),
    ("collapse", collapse_everywhere, True),
    ("memorising", memorising_everywhere, False),
    ("heterogeneity", heterogeneity, False),
)
"""Kind, rule, and whether it warns, of all sites together; told while no site is at fault."""
