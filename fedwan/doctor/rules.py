"""The doctor's rules, causes before what follows from them.

A rule looks at one network of a site, or at a site alone, and gives why and the mend, or None. Of
one site only what stands highest is told: whoever has the wrong pixels will also have long steps.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fedwan.doctor.chart import PAST, Chart

LEAST_DISTINCT = 0.5
"""Share of a shard's samples that are no copies."""
_ROUNDS = 3
_LEAST_BACKWARD = 0.25
"""Cosine with what the last updates moved by, from which on a contribution asks to undo them."""
_LITTLE_SPREAD = 0.45
"""Mean distance of generated samples over that of real ones: near 1 in a healthy run."""
_COLLAPSE_ROUNDS = 4
_SPREADS = ("spread", "variety")
"""Of samples from noise, and of images made of others."""

Told = tuple[str, str] | None
Look = Callable[[Chart, str, str], Told]


class Rule(NamedTuple):
    """What to look at, and what it is called."""

    kind: str
    look: Look
    """Gets the chart, a site and a network, either empty where the rule is not of one."""
    figures: tuple[str, ...]
    """It is asked of each network that has one of them; of none, if there are none."""

    def told(self, chart: Chart, site: str = "") -> Iterator[tuple[str | None, str, str]]:
        """Network, why and mend, of a site or of all together."""
        found = chart.names(site, *self.figures) if self.figures else [""]
        for network in found:
            if told := self.look(chart, site, network):
                yield network or None, *told


SITE_RULES: list[Rule] = []
"""Of one site, the highest first."""
RUN_RULES: list[Rule] = []
"""Of all sites together; told while no site is at fault."""


def _rule(rules: list[Rule], kind: str, *figures: str) -> Callable[[Look], Look]:
    def add(look: Look) -> Look:
        rules.append(Rule(kind, look, figures))
        return look

    return add


@_rule(SITE_RULES, "small_shard")
def small_shard(chart: Chart, site: str, _: str) -> Told:
    """Fewer distinct samples than 32, or than a twentieth of the others', or copies."""
    samples, typical = chart.both(site, "shard/samples", _ROUNDS)
    distinct = chart.steady(site, "shard/distinct", _ROUNDS)
    if samples is None or distinct is None:
        return None
    num = samples * distinct
    if num >= max(32, 0.05 * (typical or 0)) and distinct >= LEAST_DISTINCT:
        return None
    beside = "" if typical is None else f", the other sites have {typical:.0f}"
    return (
        f"its shard has {samples:.0f} samples, {num:.0f} of them distinct{beside}",
        f"check what {site} loads, and that its loader repeats nothing; if that is all it has, "
        "give its data to another site",
    )


@_rule(SITE_RULES, "noise")
def noise(chart: Chart, site: str, _: str) -> Told:
    """Images whose neighbouring pixels know nothing of each other, whatever their range.

    Real ones have a correlation of 0.5 to 0.99. Alone, only what is close to 0 is noise.
    """
    smooth, typical = chart.both(site, "x/smooth", _ROUNDS)
    if smooth is None or abs(smooth) >= (0.05 if typical is None else min(0.25, 0.4 * typical)):
        return None
    beside = "" if typical is None else f", of the other sites {typical:.2f}"
    return (
        f"neighbouring pixels of its data have a correlation of {smooth:.2f}{beside}",
        f"look at some of {site}'s samples as its workload gets them: files that are damaged, "
        "or read in the wrong shape or order, look like noise",
    )


@_rule(SITE_RULES, "range")
def pixel_range(chart: Chart, site: str, _: str) -> Told:
    """A wrong pixel range: 0 to 255 or 0 to 1 where the other sites have -1 to 1.

    Points are compared by their largest magnitude alone, within a factor of two: shards may lie on
    different sides of zero.
    """
    low, their_low = chart.both(site, "x/low", _ROUNDS)
    high, their_high = chart.both(site, "x/high", _ROUNDS)
    if low is None or high is None or their_low is None or their_high is None:
        return None
    peak, their_peak = max(-low, high) or 1.0, max(-their_low, their_high) or 1.0
    ratios = [(peak / their_peak) ** 0.5]
    if chart.past(site, "x/smooth"):
        their_span = their_high - their_low
        ratios = [(high - low) / their_span if their_span else 1.0, peak / their_peak]
    if max(max(ratio, 1 / ratio) if ratio > 0 else math.inf for ratio in ratios) <= 1.5:
        return None
    return (
        f"its data goes from {low:.3g} to {high:.3g}, that of the other sites from "
        f"{their_low:.3g} to {their_high:.3g}",
        f"scale {site}'s samples as the others': images are in [-1, 1]",
    )


@_rule(SITE_RULES, "learning_rate", "lr")
def learning_rate(chart: Chart, site: str, network: str) -> Told:
    """A learning rate that is not the others', whose pace may put them elsewhere in a warm-up."""
    mine, ratios = 0.0, list[float]()
    for rounds in (_ROUNDS, 1):  # the latest, too: of who comes seldom, others are old
        rate, typical = chart.both(site, f"lr/{network}", rounds)
        if rate is None or typical is None or rate <= 0 or not 0 < typical < math.inf:
            return None
        mine = rate
        ratios.append(rate / typical)
    if min(ratios) <= 2.5 and max(ratios) >= 1 / 2.5:
        return None
    norm = chart.steady(site, f"norm/{network}", 1)
    moved = "" if norm is None else f", and it moves {norm:.2g} times as far"
    return (
        f"its learning rate is {mine:.3g}, {ratios[-1]:.3g} times the other sites'{moved}",
        f"give {site} the learning rate of the others; in a recipe inner.{network}.lr holds for "
        "all",
    )


@_rule(SITE_RULES, "stale")
def stale(chart: Chart, site: str, _: str) -> Told:
    """A site that trains from old weights.

    It asks to undo the updates since then, in every network and more than others do, who too turn
    back where one site led astray. Who merely has other data does so in one network at most.
    """
    names = [f"backward/{network}" for network in chart.names(site, "backward")]
    pairs = [chart.both(site, name, _ROUNDS) for name in names]
    pairs = [pair for pair in pairs if pair != (0.0, 0.0)]  # of a network that does not move
    known = [(mine, typical) for mine, typical in pairs if mine is not None and typical is not None]
    is_all = known and len(known) == len(pairs)
    if is_all and all(mine >= max(_LEAST_BACKWARD, typical + 0.25) for mine, typical in known):
        least, most = min(mine for mine, _ in known), max(typical for _, typical in known)
        return (
            f"its contributions ask to undo the last updates (cosine {least:.2f} or more with "
            f"them, {most:.2f} or less elsewhere)",
            f"see in {site}'s log whether it takes updates over, and start it again: it then "
            "takes the present weights; if it does and its data differ from the others', leave it",
        )
    return None


@_rule(SITE_RULES, "memorising", "memory")
def memorising(chart: Chart, site: str, network: str) -> Told:
    """A network that learns its shard by heart: it fits training samples better than held-out ones.

    In seven pairs of ten and more than elsewhere, in most of the last eight rounds: among hundreds,
    some three in a row look so by chance. The median of three looks has a standard error of 0.06.
    """
    memory = chart.steady(site, f"memory/{network}", _ROUNDS, over=PAST)
    typical = chart.typical(site, f"memory/{network}", PAST)
    if memory is None or memory < max(0.7, 0 if typical is None else typical + 0.12):
        return None
    beside = "" if typical is None else f" (elsewhere {typical:.0%})"
    samples = chart.steady(site, "shard/samples", 1)
    shard = "" if samples is None else f" of {samples:.0f} samples"
    return (
        f"it fits a sample of its shard{shard} better than a held-out one in {memory:.0%} "
        f"of the cases{beside}",
        f"regularise the {network} (model.gamma of a GAN recipe), let it take fewer or smaller "
        "steps, "
        f"or give {site} more data",
    )


@_rule(SITE_RULES, "diverging", "norm", "loss")
def diverging(chart: Chart, site: str, network: str) -> Told:
    """A loss three times the others' and above what any of theirs began with, or long steps.

    A shard may be harder than others, and its loss fall all the same. Of a loss that others have
    below 0, as a critic's, three times says nothing.
    """
    if _looks_back(chart, site, network):
        return None
    name = f"loss/{network}"
    loss, norms = (chart.past(site, n, _ROUNDS) for n in (name, f"norm/{network}"))
    is_loss = loss and _is_loss(chart, network, min(loss))
    typical = chart.typical(site, name, _ROUNDS) if is_loss else None
    least = math.inf
    if typical is not None and typical < math.inf and len(loss) == _ROUNDS:
        least = max(3 * typical, chart.began(site, name)) if typical > 0 else sys.float_info.max
    if loss and min(loss) > least:
        now = "not finite" if math.isinf(loss[-1]) else f"{loss[-1]:.3g}"
        why = f"its loss is {now}, elsewhere {typical:.3g}"
    elif len(norms) == _ROUNDS and min(norms) > 4:
        why = f"its contributions are {norms[-1]:.2g} times as long as the other sites'"
    else:
        return None
    return why, (
        f"check the sign and the weights of the loss of {network!r} at {site}; clip gradients or "
        "lower the learning rate (inner.NETWORK.clip_norm and .lr of a recipe)"
    )


@_rule(SITE_RULES, "collapse", *_SPREADS)
def collapse(chart: Chart, site: str, network: str) -> Told:
    """A generator whose samples are nearly alike, once those of the other sites are diverse.

    Before training all are alike; a site whose latest samples are diverse has left that behind.
    """
    for name in (f"{what}/{network}" for what in _SPREADS):
        spread, typical = chart.both(site, name, _COLLAPSE_ROUNDS)
        if spread is None or typical is None or _looks_back(chart, site, network):
            continue
        if (chart.typical(site, name, 1) or 0.0) < _LITTLE_SPREAD:
            continue  # all may be at their beginning
        if max(spread, chart.past(site, name)[-1]) < _LITTLE_SPREAD and spread < 0.6 * typical:
            return (
                f"its samples spread {spread:.2f} times as far as real ones, "
                f"elsewhere {typical:.2f}",
                f"compare {site}'s losses and settings with the others'; a lower learning rate "
                f"(inner.{network}.lr of a recipe), a penalty on the discriminator or a smaller h "
                "hold it",
            )
    return None


def _looks_back(chart: Chart, site: str, network: str) -> bool:
    """Whether a network only comes from old weights, with losses from before training."""
    backward = chart.steady(site, f"backward/{network}", 2)
    return backward is not None and backward >= _LEAST_BACKWARD


def _is_loss(chart: Chart, name: str, now: float) -> bool:
    """Whether what is called so is a loss: penalties and the like may grow as they please.

    Of a script's figures, those with `loss` in their names, and any that is not finite.
    """
    networks = set(chart.names("", "lr")) & set(chart.names("", "loss"))
    return name in networks if networks else "loss" in name or math.isinf(now)


@_rule(RUN_RULES, "diverging", "loss")
def diverging_everywhere(chart: Chart, _: str, name: str) -> Told:
    """Losses of all sites that are not finite, or ten times what they were."""
    pasts = [chart.past(site, f"loss/{name}") for site in chart.sites]
    if any(len(past) < PAST for past in pasts):
        return None
    before = statistics.median(min(map(abs, past[:-_ROUNDS])) for past in pasts)
    now = statistics.median(min(map(abs, past[-_ROUNDS:])) for past in pasts)
    if not _is_loss(chart, name, now):
        return None
    # Losses of a GAN may begin near 0.
    if math.isfinite(now) and now <= 10 * max(before, 0.5):
        return None
    return (
        f"the loss {name!r} has grown from {before:.3g} to {now:.3g} at most sites",
        "lower the inner learning rate or the outer one (outer.NETWORK.lr, "
        "outer.NETWORK.momentum), clip gradients, or take a smaller h",
    )


@_rule(RUN_RULES, "collapse", *_SPREADS)
def collapse_everywhere(chart: Chart, _: str, network: str) -> Told:
    """All generators: after samples were diverse, or if they never are and no longer become so.

    Images that are made of others are all alike at the beginning.
    """
    for what in _SPREADS:
        pasts = [chart.past(site, f"{what}/{network}") for site in chart.sites]
        spreads = [statistics.median(row) for row in zip(*filter(None, pasts), strict=False)]
        if len(spreads) < PAST:
            continue
        now = statistics.median(spreads[-_COLLAPSE_ROUNDS:])
        grows = now > 1.2 * statistics.median(spreads[:-_COLLAPSE_ROUNDS])
        never = what == "spread" and max(spreads) < _LITTLE_SPREAD and not grows
        if now < _LITTLE_SPREAD and (never or now < 0.4 * max(spreads[:-_COLLAPSE_ROUNDS])):
            return (
                f"samples of every site spread {now:.2f} times as far as real ones",
                f"lower the learning rate (inner.{network}.lr of a recipe) or h, raise the "
                "discriminator's penalty, and for shards of different classes let a GAN be told "
                "the class (model.conditional=true of a recipe)",
            )
    return None


@_rule(RUN_RULES, "alike", "agreement")
def alike(chart: Chart, _: str, network: str) -> Told:
    """Contributions that are the same: sites that take the same steps on the same samples."""
    agreements = [chart.steady(site, f"agreement/{network}", _ROUNDS) for site in chart.sites]
    if len(agreements) < 2 or any((agreement or 0) < 0.9999 for agreement in agreements):
        return None
    return (
        "all sites send nearly the same contributions: they take the same samples in the same "
        "order, or their samples hardly matter to it",
        "give each site data of its own, or seed the loader with torch.initial_seed() after "
        "fedwan.join, in Lightning in train_dataloader(); else one site would do as well",
    )
