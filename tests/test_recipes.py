"""What strategies declare, and what they share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fedwan.app import load_run, load_strategies
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
from fedwan.recipes import OPTIONAL, cut, fragmentation, resolve_strategy
from fedwan.uses import Needs
from strategies import diloco, parameter_server, scaffnew, streaming_diloco, sync
from tests.support import spec

NETWORKS = {"velocity": "regression"}


def message(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


def resolved(page: ModuleType, config: Config) -> Config:
    config.strategy = page.__name__.rpartition(".")[2]
    config.inner = config.inner or {"velocity": InnerConfig()}
    resolve_strategy(page, config, dict.fromkeys(config.inner, "regression"))  # type: ignore[arg-type]
    return config


def refusal(page: ModuleType, config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        resolved(page, config)
    return message(raised)


def test_what_was_left_open_is_filled_in_and_what_the_user_named_is_kept() -> None:
    config = resolved(diloco, Config(steps=100))
    assert (config.h, config.checkpoint.every, config.codec.up) == (20, 1, "fp32")
    assert config.outer == {"velocity": OuterConfig(0.6, 0.9)}
    named = Config(steps=100, h=25, outer={"velocity": OuterConfig(0.25, 0.75)})
    named.checkpoint.every = 7
    named = resolved(diloco, named)
    assert (named.h, named.checkpoint.every) == (25, 7)
    assert named.outer == {"velocity": OuterConfig(0.25, 0.75)}


def test_a_page_without_declarations_uses_what_every_strategy_does() -> None:
    page = SimpleNamespace(__name__="plain")
    assert resolved(page, Config(steps=7)).h == 1  # type: ignore[arg-type]
    assert "h = 5 has no effect with strategy 'plain'" in refusal(page, Config(h=5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "mend"), [(119, "steps=100 or 120"), (101, "steps=100 or 120"), (7, "steps=20")]
)
def test_steps_that_are_no_multiple_of_h_are_refused_with_the_nearest(
    steps: int, mend: str
) -> None:
    text = refusal(diloco, Config(steps=steps))
    assert text.endswith(f"set {mend}") and f"steps={steps} " in text


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
        ("strategy=sync site.precision=bf16-true", "strategy=local_sgd"),
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


def test_all_that_is_wrong_is_told_at_once() -> None:
    words = "strategy=sync h=10 round.grace=3 outer.generator.lr=0.3 model.width=0 data.labels=site"
    with pytest.raises(ConfigError) as raised:
        load_run(None, words.split())
    keys = {line.partition(" ")[0] for line in str(raised.value).splitlines()}
    assert keys == {word.partition("=")[0] for word in words.split()[1:]}


def test_every_declaration_is_of_a_setting_that_may_be_declared() -> None:
    from fnmatch import fnmatchcase

    for page in load_strategies().values():
        for use in page.USES:
            pattern = use.key if isinstance(use, Needs) else use
            assert any(fnmatchcase(entry, pattern) for entry in OPTIONAL), pattern


@pytest.mark.parametrize("page", [sync, parameter_server])
def test_an_h_that_holds_anyway_is_no_mistake(page: ModuleType) -> None:
    for h in (0, 1):
        assert resolved(page, Config(h=h, steps=100)).h == 1


def test_a_stream_gets_what_was_left_open_and_keeps_what_was_not() -> None:
    for asked, found in (
        (StreamConfig(tau=7), StreamConfig(4, 7)),
        (StreamConfig(tau=0), StreamConfig(4, 0)),
        (StreamConfig(fragments=2), StreamConfig(2, 5)),
    ):
        config = resolved(streaming_diloco, Config(h=10, steps=20, stream=asked))
        assert config.stream == found
        assert resolved(streaming_diloco, config).stream == found
        overlap = streaming_diloco.build(config).overlap
        assert overlap.alpha == (0.5 if found.tau else 0.0)


def test_a_streams_defaults_fit_a_short_round() -> None:
    assert resolved(streaming_diloco, Config(h=2, steps=20)).stream == StreamConfig(2, 1)


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (StreamConfig(tau=10), "stream.tau=10 is not below h=10, "),
        (StreamConfig(fragments=11), "stream.fragments=11 is more than h=10, "),
    ],
)
def test_a_stream_that_cannot_flow_is_refused(stream: StreamConfig, text: str) -> None:
    assert text in refusal(streaming_diloco, Config(h=10, steps=20, stream=stream))


def test_the_cut_is_the_one_asked_for() -> None:
    layout = {f"net/{i}.weight": spec((4,)) for i in range(4)}
    config = Config(h=10, stream=StreamConfig(fragments=2))
    fragments = fragmentation(config)(layout)
    assert list(fragments[0].layout) == ["net/0.weight", "net/2.weight"]
    assert [f.offset for f in fragments] == [0, 5]


def test_what_needs_a_quorum_is_refused_without_one() -> None:
    for key, value in (("grace", 3.0), ("max_staleness", 2)):
        config = Config(steps=100, round=RoundConfig(**{key: value}))
        assert "needs round.quorum=3; set that" in refusal(diloco, config)
        config.round.quorum = 3
        resolved(diloco, config)


def test_a_least_above_h_is_refused() -> None:
    config = Config(steps=100, round=RoundConfig(least_steps=21))
    assert "least_steps=21 is above h=20" in refusal(diloco, config)


def test_scaffnew_bears_neither_sparse_uploads_nor_weights_in_pieces() -> None:
    config = Config(steps=100)
    config.codec.up = "topk2"
    assert "codec.up = 'topk2' does not go with strategy 'scaffnew'" in refusal(scaffnew, config)


def test_on_arrival_two_sites_must_be_live_unless_the_user_says_otherwise() -> None:
    for sites, asked, quorum in ((4, 0, 2), (1, 0, 1), (4, 1, 1), (4, 3, 3)):
        config = Config(sites=sites, steps=100, round=RoundConfig(quorum=asked))
        rounds = resolved(parameter_server, config).round
        assert (rounds.quorum, rounds.max_staleness) == (quorum, 4 * sites)


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
    resolved(diloco, config)
    layout = {"discriminator/a": spec((2,)), "generator/a": spec((2,))}
    assert [fragment.times for fragment in cut(config)(layout)] == times


def test_an_h_that_does_not_fit_into_the_run_s_is_refused_with_one_that_does() -> None:
    text = refusal(diloco, gan_config(5))
    assert "network.discriminator.h=5 does not divide h=12" in text
    assert text.endswith("set network.discriminator.h=4")
    assert "every network has an h of its own below h=12" in refusal(diloco, gan_config(4, 6))


def test_networks_apart_and_sites_at_their_own_pace_do_not_go_together() -> None:
    config = gan_config(4)
    config.round = RoundConfig(least_steps=2)
    assert "network.discriminator.h = 4 needs round.least_steps=0" in refusal(diloco, config)


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
        (["exclude=['']"], r"network.velocity.exclude = \[''\] says nothing"),
        (["exclude=read.*"], "exclude = 'read.*' is no list"),
        (["exclude=[read.*]", "strategy=sync"], "has no effect with strategy 'sync'"),
        (["exclude=[read.*]", "strategy=parameter_server"], "no effect with strategy 'parameter_"),
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
