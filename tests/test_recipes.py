"""What strategies declare, and what they share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from fedwan.app import load_run
from fedwan.config import Config, InnerConfig, OuterConfig, RoundConfig, dump
from fedwan.errors import ConfigError
from fedwan.recipes import cut, resolve_strategy
from strategies import diloco, parameter_server
from tests.support import spec

STREAM = "strategy=streaming_diloco h=10 steps=20"
GAN = "strategy=diloco h=12 steps=24 network"
FLOW = "workload=flow network.velocity"
EXPERTS = "strategy=experts workload"


def resolved(page: ModuleType, config: Config) -> Config:
    config.strategy = page.__name__.rpartition(".")[2]
    config.inner = config.inner or {"velocity": InnerConfig()}
    resolve_strategy(page, config, dict.fromkeys(config.inner, "regression"))  # type: ignore[arg-type]
    return config


def test_what_was_left_open_is_filled_in_and_what_the_user_named_is_kept() -> None:
    config = resolved(diloco, Config(steps=100))
    assert (config.h, config.checkpoint.every, config.codec.up) == (20, 1, "fp32")
    assert config.outer == {"velocity": OuterConfig(0.6, 0.9)}
    named = Config(steps=100, h=25, outer={"velocity": OuterConfig(0.25, 0.75)})
    named.checkpoint.every = 7
    named = resolved(diloco, named)
    assert (named.h, named.checkpoint.every) == (25, 7)
    assert named.outer == {"velocity": OuterConfig(0.25, 0.75)}


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        ("strategy=sync h=20", "strategy=local_sgd"),
        ("strategy=local_sgd outer.generator.lr=0.3", "strategy=diloco"),
        ("strategy=diloco stream.tau=0", "strategy=streaming_diloco"),
        ("strategy=diloco stream.fragments=2 stream.tau=3", "strategy="),
        ("strategy=eager_diloco stream.tau=0", "strategy=streaming_diloco"),
        ("strategy=async_diloco network.discriminator.h=5", "strategy=diloco"),
        ("strategy=sync inner.generator.state=reset", "strategy="),
        ("strategy=parameter_server network.generator.exclude=['*.bias']", "strategy="),
        ("strategy=parameter_server site.processes=2 site.partition=gradients", "strategy=sync"),
    ],
)
def test_what_a_strategy_does_not_follow_is_refused_with_one_that_does(
    words: str, mend: str
) -> None:
    with pytest.raises(ConfigError, match=r"has no effect with|does not go with") as raised:
        load_run(None, words.split())
    for line in str(raised.value).splitlines():
        assert f"; leave it out, or set {mend}" in line
    other = str(raised.value).rpartition("strategy=")[2]
    load_run(None, [*words.split(), f"strategy={other}"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("strategy=diloco steps=100 round.least_steps=21", "needs round.least_steps=20 or less"),
        ("strategy=diloco network.generator.h=4 round.least_steps=2", "needs round.least_steps=0"),
        ("round.least_steps=1 round.quorum=3 round.max_staleness=2", "needs round.least_steps=0;"),
        ("strategy=scaffnew codec.up=topk2", "does not go with strategy 'scaffnew'"),
        ("strategy=scaffnew round.least_steps=1", "round.least_steps = 1"),
        ("strategy=scaffnew outer.generator.lr=0.5", "outer.generator.lr = 0.5"),
        ("strategy=scaffnew stream.tau=2", "stream.tau = 2"),
        ("strategy=scaffnew round.merge=median", "round.merge = 'median' has no effect with"),
        ("strategy=async_diloco round.merge=median", "has no effect .* set strategy="),
        ("round.merge=median:1 codec.up=topk2", "'median:1' needs codec.up=int4, not topk2; set"),
        ("round.merge=median round.least_steps=1", "'median' needs round.least_steps=0; set"),
        ("round.merge=median round.quorum=3 round.max_staleness=1", "needs round.max_staleness=0;"),
        ("round.merge=median:2", "'median:2' needs 5 contributions"),
        ("workload=command site.precision=bf16-mixed", "'bf16-mixed' needs a recipe: a script has"),
        ("workload=command inner.net.clip_norm=1", "clip_norm = 1.0 has no effect: a script makes"),
        ("workload=command inner.net.state=average inner.net.name=own", "needs inner.NETWORK.name"),
        ("workload=command stream.tau=3", "stream.tau = 3 has no effect with strategy 'diloco'"),
        ("workload=command h=7 steps=20", "steps=20 is no multiple of h=7"),
        ("workload=command round.merge=krum", "'krum' needs 5 contributions"),
        ("workload=command site.processes=2", "processes = 2 needs a recipe: torchrun"),
        ("workload=command site.partition=weights", "'weights' needs a recipe: torchrun"),
        ("workload=command data.split=dirichlet:0.3", "'dirichlet:0.3' needs a recipe"),
        ("round.merge=krum", "where a round may close with 4; set sites=5, or round.merge=mean"),
        ("round.merge=median sites=5 round.quorum=2", "close with 2; set round.quorum=3"),
        ("h=20 steps=119", "steps=119 is no multiple of h=20.*set steps=100 or 120"),
        ("h=20 steps=7", "steps=7 is no multiple of h=20.*set steps=20"),
        (f"{GAN}.discriminator.h=5", "h=5 does not divide h=12.*; set network.discriminator.h=4$"),
        (f"{GAN}.discriminator.h=4 network.generator.h=6", "has an h of its own below h=12"),
        ("network.gen.exclude=[a]", "network.gen: workload 'gan' trains"),
        (f"{STREAM} stream.tau=10", "stream.tau = 10 needs stream.tau=9 or less"),
        (f"{STREAM} stream.fragments=11", "fragments = 11 needs stream.fragments=10 or less"),
        (f"{FLOW}.exclude=[raed.weight]", "'raed.weight', which matches .* mean 'read.weight'"),
        (f"{FLOW}.exclude=['*']", r"exclude = \['\*'\] matches all parameters"),
        (f"{FLOW}.exclude=['']", r"network.velocity.exclude = \[''\] says nothing"),
        (f"{FLOW}.exclude=a,b", "exclude = 'a,b' is no list"),
        (f"{FLOW}.exclude=[read.*] strategy=sync", "has no effect with strategy 'sync'"),
        (f"{EXPERTS}=pix2pix data.name=photo_edges", "'pix2pix' does not bear"),
        (f"{EXPERTS}=flow inner.velocity.state=average", "has no effect with strategy 'experts'"),
        (f"{EXPERTS}=flow round.merge=median sites=3", "has no effect with strategy 'experts'"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        load_run(None, words.split())
    assert "\n" not in str(raised.value)


def test_on_arrival_two_sites_must_be_live_unless_the_user_says_otherwise() -> None:
    for sites, asked, quorum in ((4, 0, 2), (1, 0, 1), (4, 1, 1), (4, 3, 3)):
        config = Config(sites=sites, steps=100, round=RoundConfig(quorum=asked))
        rounds = resolved(parameter_server, config).round
        assert (rounds.quorum, rounds.max_staleness) == (quorum, 4 * sites)


@pytest.mark.parametrize(
    ("h", "times"), [(12, [1]), (0, [1]), (6, [1, 2]), (3, [1, 4]), (1, [1, 12])]
)
def test_a_network_s_own_h_says_how_often_it_travels(h: int, times: list[int]) -> None:
    config = load_run(None, f"{GAN}.discriminator.h={h}".split())
    layout = {"discriminator/a": spec((2,)), "generator/a": spec((2,))}
    assert [fragment.per_round for fragment in cut(config)(layout)] == times


def test_patterns_of_what_stays_at_sites_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    words = [f'{FLOW}.exclude=["*.bias",read.weight]', "h=20"]
    config = load_run(None, " ".join(words).split())
    assert config.excluded == {"velocity": ["*.bias", "read.weight"]}
    dump(config, tmp_path / "config.yaml")
    assert load_run(tmp_path / "config.yaml", []) == config
    assert load_run(None, f"{FLOW}.exclude=[]".split()).excluded == {}
