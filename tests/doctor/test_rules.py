"""Each fault is told by its name, at its site, in its network, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from fedwan.doctor.diagnosis import Doctor, Finding
from fedwan.output.records import RoundRecord
from tests.doctor.records import NETWORKS, SITES, Bend, at, figures, healthy, told


def scaled(network: str, norm: float = 1.0, loss: float = 1.0) -> Bend:
    def bend(record: RoundRecord) -> RoundRecord:
        return replace(
            record,
            norms={**record.norms, network: (record.norms[network] or 0.0) * norm},
            losses={**record.losses, network: (record.losses[network] or 0.0) * loss},
        )

    return bend


def backward(**values: float) -> Bend:
    return lambda record: replace(record, backward={**record.backward, **values})


def both(*bends: Bend) -> Bend:
    def bend(record: RoundRecord) -> RoundRecord:
        for one in bends:
            record = one(record)
        return record

    return bend


CASES: dict[str, tuple[Bend, str, str | None, str]] = {
    "noise": (
        both(figures(x_smooth=0.01), scaled("generator", norm=1.7)),
        *("noise", None, "correlation of 0.01, of the other sites 0.55"),
    ),
    "bytes": (
        figures(x_low=0.0, x_high=255.0),
        *("range", None, "goes from 0 to 255, that of the other sites from -1 to 1"),
    ),
    "unit interval": (figures(x_low=0.0, x_high=1.0), "range", None, "goes from 0 to 1"),
    "another scale": (figures(x_low=-10.0, x_high=10.0), "range", None, "goes from -10 to 10"),
    "few": (
        both(figures(shard_samples=8.0), scaled("discriminator", loss=0.3)),
        *("small_shard", None, "8 samples, 8 of them distinct, the other sites have 350"),
    ),
    "copies": (
        figures(shard_samples=350.0, shard_distinct=0.1),
        *("small_shard", None, "350 samples, 35 of them distinct"),
    ),
    "fast": (
        both(figures(lr_generator=3e-2), scaled("generator", norm=6.2)),
        *("learning_rate", "generator", "0.03, 10 times the other sites', and it moves"),
    ),
    "slow": (figures(lr_generator=3e-4), "learning_rate", "generator", "0.1 times"),
    "old weights": (
        backward(discriminator=0.5, generator=0.6),
        *("stale", None, "ask to undo the last updates (cosine 0.50 or more"),
    ),
    "memory": (
        both(figures(memory_discriminator=0.9), scaled("generator", loss=2.5)),
        *("memorising", "discriminator", "in 90% of the cases (elsewhere 52%)"),
    ),
    "loss": (scaled("generator", loss=5.0), "diverging", "generator", "elsewhere 0.9"),
    "norm": (scaled("generator", norm=6.0), "diverging", "generator", "times as long"),
    "collapse": (figures(spread_generator=0.1), "collapse", "generator", "0.10 times as far"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_told_once_with_its_site_its_network_and_its_figures(name: str) -> None:
    bend, kind, network, why = CASES[name]
    site = SITES[len(name) % 4]
    if name == "another scale":  # of points
        bend = both(_without_smoothness, bend)
    (finding,) = told(at(site, bend))
    assert (finding.kind, finding.site, finding.network) == (kind, site, network)
    assert why in finding.why and finding.mend
    assert 3 <= finding.version <= 5
    shown = f"{site}, {network}" if network else site
    assert finding.text == f"{shown}: {kind.replace('_', ' ')}: {finding.why}; {finding.mend}"
    assert "\n" not in finding.text


def _without_smoothness(record: RoundRecord) -> RoundRecord:
    rest = {name: value for name, value in record.figures.items() if name != "x/smooth"}
    return replace(record, figures=rest)


def _in_round(version: int, bend: Bend, record: RoundRecord) -> RoundRecord:
    return bend(record) if record.version == version else record


def test_a_healthy_run_has_no_finding() -> None:
    assert told(lambda record: record, rounds=40) == []


def test_points_on_different_sides_of_zero_are_no_wrong_range() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        sides = {"s1": (0.1, 1.0), "s2": (-1.0, -0.1), "s3": (-0.7, 0.7), "s4": (-0.2, 0.7)}
        low, high = sides[record.site]
        return figures(x_low=low, x_high=high)(_without_smoothness(record))

    assert told(bend) == []


def test_sites_that_send_the_same_are_told_so() -> None:
    one = dict.fromkeys(NETWORKS, 1.0)
    bend: Bend = lambda record: replace(record, cosines=one, agreement=one)  # noqa: E731
    for sites in (SITES, SITES[:2]):
        found = told(bend, sites=sites)
        assert [(f.kind, f.site) for f in found] == [("alike", None)] * 2
    assert not told(bend, sites=SITES[:1])


def test_two_sites_are_compared_in_nothing() -> None:
    bends = [CASES[name][0] for name in ("fast", "bytes", "loss", "norm")]
    for bend in bends:
        assert told(at("s1", bend), sites=SITES[:2]) == []


def test_what_needs_no_comparison_is_told_of_a_site_alone() -> None:
    for name in ("few", "memory", "noise"):
        (finding,) = told(at("s1", CASES[name][0]), sites=SITES[:1])
        assert (finding.site, finding.kind) == ("s1", CASES[name][1])


def test_a_cause_is_told_instead_of_what_follows_from_it() -> None:
    everything = both(*(bend for name, (bend, *_) in CASES.items() if name != "bytes"))
    assert [f.kind for f in told(at("s2", everything))] == ["small_shard"]


def by_round(name: str, value: Callable[[int], float]) -> Bend:
    """A figure of every site, by version."""
    return lambda record: figures(**{name: value(record.version)})(record)


def test_a_loss_below_what_another_sites_began_with_has_not_diverged() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        first = {"s1": 0.30, "s2": 0.25, "s3": 0.44, "s4": 0.51}[record.site]
        later = 0.41 if record.site == "s3" else 0.12
        return replace(record, losses={"discriminator": first if record.version == 1 else later})

    # Pairs of images, each site with one photograph of its own: no discriminator is ever worse.
    assert told(bend) == []


def test_a_loss_that_is_not_finite_is_divergence_at_its_site() -> None:
    bend = at("s3", lambda record: replace(record, losses={**record.losses, "generator": None}))
    (finding,) = told(bend)
    assert (finding.kind, finding.site) == ("diverging", "s3") and "not finite" in finding.why


def test_a_first_loss_that_is_not_finite_hides_nobody_s_divergence() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        loss = None if record.version == 1 else 1.0
        return replace(record, losses={"generator": 50.0 if record.site == "s3" else loss})

    assert ("diverging", "s3") in [(found.kind, found.site) for found in told(bend)]


def test_samples_that_become_alike_everywhere_are_the_runs() -> None:
    bend = by_round("spread_generator", lambda version: 0.9 if version < 5 else 0.1)
    (finding,) = told(bend)
    assert (finding.kind, finding.site) == ("collapse", None)
    assert told(bend, rounds=4) == []
    # Small spread at the beginning is none.
    assert told(by_round("spread_generator", lambda version: min(0.9, 0.1 * version)), 20) == []


def one_site(name: str, values: list[float]) -> Bend:
    """The first site's figure by round, of a run that is healthy otherwise."""
    return at("s1", by_round(name, lambda version: values[version - 1]))


@pytest.mark.parametrize("name", ["spread_generator", "variety_generator"])
def test_a_site_whose_samples_spread_later_than_the_others_has_not_collapsed(name: str) -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        pace = 0.04 if record.site == "s2" else 0.11
        return figures(**{name: pace * record.version})(record)

    # In round 4 it has 0.16, the others 0.44, and little is no fault yet.
    assert told(bend, rounds=4) == []
    assert [(f.kind, f.site) for f in told(bend, rounds=5)] == [("collapse", "s2")]


def test_images_made_of_others_may_be_alike_for_long_but_not_again() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        spread = 0.1 if record.version < 20 or record.version > 30 else 0.9
        values = {**record.figures, "variety/generator": spread}
        return replace(record, figures={k: v for k, v in values.items() if "spread" not in k})

    assert told(bend, rounds=30) == []
    (finding,) = told(bend, rounds=40)
    assert (finding.kind, finding.site, finding.network) == ("collapse", None, "generator")


def test_three_rounds_of_many_that_look_like_memory_are_chance_and_most_of_eight_are_not() -> None:
    some, much = [0.6, 0.59, 0.5, 0.55, 0.55, 0.72, 0.73, 0.73], [0.85] * 5
    assert told(one_site("memory_discriminator", some), rounds=8) == []
    (finding,) = told(one_site("memory_discriminator", [0.5] * 8 + much), rounds=13)
    assert (finding.kind, finding.site, finding.version) == ("memorising", "s1", 13)
    (finding,) = told(one_site("memory_discriminator", much), rounds=5)
    assert finding.version == 3


def test_figures_that_are_unknown_or_odd_do_no_harm() -> None:
    odd = dict.fromkeys(["x/low", "x/high", "lr/generator", "shard/samples"], 0.0)

    def bend(record: RoundRecord) -> RoundRecord:
        values: dict[str, float | None] = {**record.figures, **odd, "lr/": 1.0, "x/smooth": None}
        norms = dict.fromkeys(NETWORKS, 0.0 if record.version % 2 else None)
        return replace(record, figures=values, norms=norms, losses={"generator": -math.pi})

    told(bend)
    told(at("s1", bend))


@pytest.mark.parametrize("name", CASES)
def test_of_three_sites_the_odd_one_is_told_and_nobody_else(name: str) -> None:
    bend, kind, *_ = CASES[name]
    if name == "another scale":
        bend = both(_without_smoothness, bend)
    for site in SITES[:3]:
        found = told(at(site, bend), rounds=20, sites=SITES[:3])
        assert [(f.kind, f.site) for f in found] == [(kind, site)], name


def test_a_shard_of_many_times_the_samples_makes_no_small_ones_of_two_others() -> None:
    assert told(at("s1", figures(shard_samples=14_000.0)), sites=SITES[:3]) == []


def in_fragments(num: int, bend: Bend, rounds: int) -> list[Finding]:
    """As `told`, where each round's contribution leaves in so many parts."""
    doctor, found = Doctor(), list[Finding]()
    for version in range(1, rounds + 1):
        for fragment in range(num):
            part = [replace(bend(healthy(version, site)), fragment=fragment) for site in SITES]
            if fragment < num - 1:  # a site looks at itself once in a round
                part = [replace(record, figures={}) for record in part]
            found += doctor.take(part)
    return found


@pytest.mark.parametrize("num", [1, 2, 4, 10])
def test_losses_that_grow_everywhere_are_told_however_many_fragments_there_are(num: int) -> None:
    def grow(record: RoundRecord) -> RoundRecord:
        return scaled("generator", loss=2.0 ** max(0, record.version - 10))(record)

    (finding,) = in_fragments(num, grow, 20)
    assert (finding.kind, finding.site, finding.network) == ("diverging", None, "generator")
    assert finding.version in (16, 17)


@pytest.mark.parametrize("num", [1, 2, 4, 10])
def test_one_odd_round_is_no_fault_however_many_fragments_there_are(num: int) -> None:
    for name, (bend, *_) in CASES.items():
        assert in_fragments(num, at("s2", partial(_in_round, 5, bend)), 12) == [], name


def test_a_site_that_takes_more_steps_than_others_and_goes_further_has_not_diverged() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        steps = 20 if record.site == "s1" else 3
        norms = {"generator": (record.norms["generator"] or 0) * math.sqrt(steps)}
        return replace(record, norms=norms, samples=32 * steps)

    assert told(bend) == []
    # Nor has one that takes fewer, whose steps are longer on average.
    assert told(lambda record: replace(bend(record), samples=record.samples)) == []


def seldom(
    site: str, is_there: Callable[[int], bool], rate: Callable[[int], float]
) -> list[Finding]:
    """What is told where one site contributes in some rounds alone, under a schedule."""
    doctor, found = Doctor(), list[Finding]()
    for version in range(1, 101):
        bend = figures(lr_generator=rate(version), lr_discriminator=rate(version))
        here = [one for one in SITES if one != site or is_there(version)]
        found += doctor.take([bend(healthy(version, one)) for one in here])
    return found


@pytest.mark.parametrize("absence", [range(4, 60), range(4, 80), range(4, 90), range(4, 20)])
def test_a_site_that_comes_back_under_a_schedule_has_the_others_rate(absence: range) -> None:
    for rate in (
        lambda version: 1e-3 * (1 + math.cos(math.pi * version / 101)),
        lambda version: 1e-3 * min(1.0, version / 30),
    ):
        assert seldom("s1", lambda version: version not in absence, rate) == []


@pytest.mark.parametrize("every", [2, 3, 4, 6, 8, 9, 20])
def test_a_site_that_is_merged_in_every_few_rounds_has_the_others_rate(every: int) -> None:
    rate: Callable[[int], float] = lambda v: 1e-3 * (1 + math.cos(math.pi * v / 101))  # noqa: E731
    assert seldom("s1", lambda version: version % every == 0, rate) == []


@pytest.mark.parametrize("every", [4, 9, 20])
def test_what_is_wrong_at_a_site_that_is_merged_seldom_is_told(every: int) -> None:
    for name in ("noise", "few", "fast"):
        doctor, found = Doctor(), list[Finding]()
        for version in range(1, 3 * every + 1):
            here = [site for site in SITES if site != "s1" or version % every == 0]
            bend = at("s1", CASES[name][0])
            found += doctor.take([bend(healthy(version, site)) for site in here])
        assert [(f.site, f.version) for f in found] == [("s1", 3 * every)], name


@pytest.mark.parametrize("name", ["nll", "train_loss"])
def test_a_scripts_figure_that_is_not_finite_at_all_sites_is_told(name: str) -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        return of_a_script(**{name: None if record.version > 15 else 0.5})(record)

    (finding,) = told(bend, rounds=24)
    assert (finding.kind, finding.site, finding.network) == ("diverging", None, name)


def test_a_shard_of_few_samples_hides_no_divergence_of_all_sites() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        few = at("s1", figures(shard_samples=20.0))(record)
        return scaled("generator", loss=1e4 if record.version > 20 else 1.0)(few)

    found = [(f.kind, f.site) for f in told(bend, rounds=30)]
    assert found == [("small_shard", "s1"), ("diverging", None)]


def test_a_site_that_has_gone_hides_no_divergence_of_all_others() -> None:
    doctor, found = Doctor(), list[Finding]()
    for version in range(1, 40):
        bend = both(
            at("s1", CASES["fast"][0]),
            scaled("generator", loss=1e4 if version > 25 else 1.0),
        )
        here = SITES if version < 8 else SITES[1:]
        found += doctor.take([bend(healthy(version, site)) for site in here])
    assert [(f.kind, f.site) for f in found] == [("learning_rate", "s1"), ("diverging", None)]


def test_a_loss_that_is_not_finite_is_told_where_the_others_is_below_zero() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        is_odd = record.site == "s3" and record.version > 5
        return replace(record, losses={"generator": None if is_odd else -0.1})

    assert [(f.kind, f.site) for f in told(bend)] == [("diverging", "s3")]


def of_a_script(**losses: float | None) -> Bend:
    """A record without figures, with one network that is called otherwise than its losses."""
    return lambda record: replace(record, losses=losses, norms={"unet": 2.0}, figures={})


@pytest.mark.parametrize("loss", [None, 1e4])
def test_a_scripts_loss_that_diverges_at_one_site_is_told(loss: float | None) -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        is_odd = record.site == "s1" and record.version > 10
        return of_a_script(train_loss=loss if is_odd else 0.5, tokens=1.0)(record)

    (finding,) = told(bend, rounds=20)
    assert (finding.kind, finding.site, finding.network) == ("diverging", "s1", "train_loss")


def test_a_scripts_counter_is_no_loss() -> None:
    bend: Bend = lambda record: of_a_script(loss=0.5, tokens=2.0**record.version)(record)  # noqa: E731
    assert told(bend, rounds=20) == []


def test_samples_that_still_become_more_diverse_have_not_collapsed() -> None:
    spreads = [0.11, 0.15, 0.11, 0.12, 0.17, 0.15, 0.22, 0.31, 0.35, 0.52, 0.60, 0.65, 0.70, 0.71]
    assert told(by_round("spread_generator", lambda version: spreads[version - 1]), 14) == []
    (finding,) = told(by_round("spread_generator", lambda version: 0.2))
    assert (finding.kind, finding.site) == ("collapse", None)


def test_a_network_that_does_not_move_keeps_no_stale_site_hidden() -> None:
    def bend(record: RoundRecord) -> RoundRecord:
        own = 0.6 if record.site == "s2" else -0.1
        return replace(record, backward={"discriminator": own, "generator": own, "head": 0.0})

    assert [(f.kind, f.site) for f in told(bend)] == [("stale", "s2")]
