"""What strategy recipes fill in, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedwan.app import load_run
from fedwan.config import (
    Config,
    InnerConfig,
    NetworkConfig,
    OuterConfig,
    RoundConfig,
    StreamConfig,
    dump,
)
from fedwan.errors import ConfigError
from fedwan.overlap import Overlap
from fedwan.recipes import (
    cut,
    fill_arrival,
    fill_barrier,
    fill_outer,
    fill_schedule,
    fill_stream,
    fragmentation,
    overlap,
    refuse_h,
    refuse_outer,
    refuse_state,
    refuse_stream,
    resolve_strategy,
)
from strategies import parameter_server, sync
from tests.support import spec


def message(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_an_open_schedule_is_filled_in() -> None:
    config = Config(steps=100)
    fill_schedule(config, h=20, checkpoint_every=3)
    assert (config.h, config.checkpoint.every) == (20, 3)


def test_what_the_user_named_is_kept() -> None:
    config = Config(steps=100, h=25)
    config.checkpoint.every = 7
    fill_schedule(config, h=20, checkpoint_every=3)
    assert (config.h, config.checkpoint.every) == (25, 7)


@pytest.mark.parametrize(
    ("steps", "mend"), [(119, "steps=100 or 120"), (101, "steps=100 or 120"), (7, "steps=20")]
)
def test_steps_that_are_no_multiple_of_h_are_refused_with_the_nearest(
    steps: int, mend: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        fill_schedule(Config(steps=steps), h=20, checkpoint_every=1)
    assert message(raised).endswith(f"set {mend}") and f"steps={steps} " in message(raised)


def test_open_outer_settings_are_filled_in_and_named_ones_kept() -> None:
    config = Config(outer={"velocity": OuterConfig(0.25, 0.75)})
    fill_outer(config, "velocity", lr=0.5, momentum=0.5)
    fill_outer(config, "generator", lr=0.5, momentum=0.5)
    assert config.outer == {
        "velocity": OuterConfig(0.25, 0.75),
        "generator": OuterConfig(0.5, 0.5),
    }


@pytest.mark.parametrize(
    ("outer", "key"),
    [
        (OuterConfig(0.0, 0.5), "outer.velocity.lr=0;"),
        (OuterConfig(-1.0, 0.5), "outer.velocity.lr=-1;"),
        (OuterConfig(float("nan"), 0.5), "outer.velocity.lr=nan;"),
        (OuterConfig(0.5, 1.0), "outer.velocity.momentum=1;"),
        (OuterConfig(0.5, -0.1), "outer.velocity.momentum=-0.1;"),
        (OuterConfig(0.5, float("nan")), "outer.velocity.momentum=nan;"),
    ],
)
def test_outer_settings_out_of_range_are_refused(outer: OuterConfig, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        fill_outer(Config(outer={"velocity": outer}), "velocity", lr=0.5, momentum=0.5)
    assert message(raised).startswith(key)


def test_outer_settings_without_effect_are_refused() -> None:
    config = Config(strategy="sync", outer={"velocity": OuterConfig()})
    with pytest.raises(ConfigError) as raised:
        refuse_outer(config, {"velocity": "regression"}, "has none")
    assert "outer.velocity has no effect: strategy 'sync' has none;" in message(raised)
    refuse_outer(Config(), {"velocity": "regression"}, "has none")


def test_an_h_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_h(Config(strategy="sync", h=20), "has no local steps")
    assert "h=20 has no effect" in message(raised)
    for h in (0, 1):
        refuse_h(Config(h=h), "has no local steps")


def test_what_becomes_of_moments_is_refused_where_no_update_leaves_any_behind() -> None:
    inner = {"generator": InnerConfig(), "discriminator": InnerConfig(state="average")}
    with pytest.raises(ConfigError) as raised:
        refuse_state(Config(strategy="sync", inner=inner), "has the same ones everywhere")
    assert "inner.discriminator.state=average has no effect" in message(raised)
    refuse_state(Config(strategy="sync", inner={"generator": InnerConfig()}), "has the same")


@pytest.mark.parametrize("recipe", [sync, parameter_server], ids=["sync", "parameter_server"])
def test_strategies_that_exchange_gradients_refuse_it(recipe: ModuleType) -> None:
    config = Config(strategy="x", steps=20, inner={"generator": InnerConfig(state="reset")})
    with pytest.raises(ConfigError, match=r"inner.generator.state=reset has no effect"):
        resolve_strategy(recipe, config, {"generator": "adversarial"})


def stream_config(**stream: Any) -> Config:
    return Config(strategy="streaming_diloco", h=10, steps=20, stream=StreamConfig(**stream))


def test_a_stream_gets_what_was_left_open_and_keeps_what_was_not() -> None:
    config = stream_config(tau=7)
    fill_stream(config, fragments=4, tau=5, alpha=0.5)
    assert config.stream == StreamConfig(4, "strided", 7, 0.5)


def test_no_overlap_and_no_share_can_be_asked_for_and_stay_asked_for() -> None:
    for asked, found in (
        ({"alpha": 0.0}, StreamConfig(4, "strided", 5, 0.0)),
        ({"tau": 0}, StreamConfig(4, "strided", 0, 0.0)),
        ({"tau": 0, "alpha": 0.0}, StreamConfig(4, "strided", 0, 0.0)),
    ):
        config = stream_config(**asked)
        for _ in "12":
            fill_stream(config, fragments=4, tau=5, alpha=0.5)
            assert config.stream == found
        assert overlap(config) == Overlap(found.tau or 0, 0.0)


def test_a_share_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stream.alpha=0.3 has no effect with stream.tau=0"):
        fill_stream(stream_config(tau=0, alpha=0.3), fragments=4, tau=5, alpha=0.5)


def test_a_streams_defaults_fit_a_short_round() -> None:
    config = stream_config()
    config.h = 2
    fill_stream(config, fragments=4, tau=5, alpha=0.5)
    assert (config.stream.fragments, config.stream.tau) == (2, 1)


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        ({"tau": 10}, r"stream.tau=10 is not below h=10, .* set stream.tau=9"),
        ({"fragments": 11}, r"stream.fragments=11 is more than h=10, .* set stream.fragments=10"),
    ],
)
def test_a_stream_that_cannot_flow_is_refused_with_what_can(
    stream: dict[str, int], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        fill_stream(stream_config(**stream), fragments=4, tau=5, alpha=0.5)


def test_stream_settings_are_refused_where_nothing_streams() -> None:
    config = stream_config(alpha=0.5)
    config.strategy = "diloco"
    with pytest.raises(ConfigError, match=r"stream.alpha=0.5 has no effect: strategy 'diloco'"):
        refuse_stream(config)
    refuse_stream(Config())
    for key in ("alpha", "tau"):
        zero = stream_config(**{key: 0})
        zero.strategy = "diloco"
        with pytest.raises(ConfigError, match=rf"stream.{key}=0 has no effect"):
            refuse_stream(zero)


def test_the_cut_is_the_one_asked_for() -> None:
    layout = {f"net/{i}.weight": spec((4,)) for i in range(4)}
    for pattern, first in (("strided", ["0", "2"]), ("blocks", ["0", "1"])):
        config = stream_config(fragments=2, pattern=pattern)
        fragments = fragmentation(config)(layout)
        assert list(fragments[0].layout) == [f"net/{i}.weight" for i in first]
        assert [f.offset for f in fragments] == [0, 5]


def test_a_barrier_s_settings_without_effect_are_refused_with_what_would_give_them_one() -> None:
    for key, value in (("grace", 3.0), ("max_staleness", 2)):
        config = Config(strategy="diloco", steps=100, h=20)
        setattr(config.round, key, value)
        with pytest.raises(ConfigError) as raised:
            fill_barrier(config)
        assert message(raised).endswith("waits for all 4 sites; set round.quorum=3")
        config.round.quorum = 3
        fill_barrier(config)


def test_a_warm_up_is_refused_where_all_rounds_wait() -> None:
    config = Config(strategy="diloco", steps=100, h=20, round=RoundConfig(warmup=3))
    with pytest.raises(ConfigError, match="round.warmup=3 has no effect.*strategy=async_diloco"):
        fill_barrier(config)


@pytest.mark.parametrize("fill", [fill_barrier, partial(fill_arrival, warmup=0, least_steps=1)])
def test_a_least_above_h_is_refused(fill: Callable[[Config], None]) -> None:
    config = Config(strategy="diloco", steps=100, h=20, round=RoundConfig(least_steps=21))
    with pytest.raises(ConfigError, match="least_steps=21 is above h=20.*least_steps=20 or less"):
        fill(config)


def test_on_arrival_two_sites_must_be_live_unless_the_user_says_otherwise() -> None:
    for sites, asked, quorum in ((4, 0, 2), (1, 0, 1), (4, 1, 1), (4, 3, 3)):
        config = Config(sites=sites, h=20, round=RoundConfig(quorum=asked))
        fill_arrival(config, warmup=5, least_steps=1)
        rounds = config.round
        assert (rounds.quorum, rounds.warmup, rounds.least_steps) == (quorum, 5, 1)
        assert rounds.max_staleness == 4 * sites


def gan_config(discriminator: int, generator: int = 0, h: int = 12) -> Config:
    config = Config(steps=24, h=h, inner={n: InnerConfig() for n in ("discriminator", "generator")})
    config.network = {"discriminator": NetworkConfig(h=discriminator)}
    if generator:
        config.network["generator"] = NetworkConfig(h=generator)
    return config


@pytest.mark.parametrize(
    ("h", "times"), [(12, [1]), (0, [1]), (6, [1, 2]), (3, [1, 4]), (1, [1, 12])]
)
def test_a_network_s_own_h_says_how_often_it_travels(h: int, times: list[int]) -> None:
    config = gan_config(h)
    fill_schedule(config, h=20, checkpoint_every=1)
    layout = {"discriminator/a": spec((2,)), "generator/a": spec((2,))}
    assert [fragment.times for fragment in cut(config)(layout)] == times


def test_an_h_that_does_not_fit_into_the_run_s_is_refused_with_one_that_does() -> None:
    with pytest.raises(ConfigError) as raised:
        fill_schedule(gan_config(5), h=20, checkpoint_every=1)
    assert "network.discriminator.h=5 does not divide h=12" in message(raised)
    assert message(raised).endswith("set network.discriminator.h=4")
    with pytest.raises(ConfigError, match=r"every network has an h of its own below h=12"):
        fill_schedule(gan_config(4, 6), h=20, checkpoint_every=1)


def test_networks_apart_and_sites_at_their_own_pace_do_not_go_together() -> None:
    config = gan_config(4)
    config.round = RoundConfig(least_steps=2)
    with pytest.raises(ConfigError, match=r"network.discriminator.h=4 has no effect with round"):
        fill_barrier(config)


# What stays at sites ------------------------------------------------------------------------------


def asked(*words: str) -> Config:
    return load_run(None, ["workload=flow", *words])


def test_patterns_of_what_stays_at_sites_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    config = asked('network.velocity.exclude=["*.bias", read.weight]', "h=20")
    assert config.excluded == {"velocity": ["*.bias", "read.weight"]}
    dump(config, tmp_path / "config.yaml")
    assert load_run(tmp_path / "config.yaml", []) == config
    assert asked("network.velocity.exclude=[]").excluded == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["exclude=[raed.weight]"], "'raed.weight', which matches .* did you mean 'read.weight'"),
        (["exclude=['*']"], r"exclude = \['\*'\] matches all parameters"),
        (["exclude=['']"], "network.velocity.exclude = '' says nothing"),
        (["exclude=read.*"], "exclude = 'read.*' is no list"),
        (["exclude=[read.*]", "strategy=sync"], "exclude does not go with strategy 'sync'"),
        (["exclude=[read.*]", "strategy=parameter_server"], "not go with strategy 'parameter_"),
    ],
    ids=" ".join,
)
def test_what_cannot_stay_at_sites_is_refused_before_the_run(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        asked(f"network.velocity.{words[0]}", *words[1:])
    message(raised)


def test_what_stays_at_sites_is_of_a_network_that_is_trained() -> None:
    with pytest.raises(ConfigError, match="network.velocities: workload 'flow' trains velocity"):
        asked("network.velocities.exclude=[read.*]")


def test_fragments_are_cut_from_what_travels() -> None:
    words = ("strategy=streaming_diloco", "model.depth=1", "h=20")
    most = asked(*words, "stream.fragments=6").stream.fragments
    with pytest.raises(ConfigError, match=f"stream.fragments={most} where the largest network has"):
        asked(*words, "stream.fragments=6", "network.velocity.exclude=[read.*]")
