"""Reading, checking and writing a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.config import (
    Config,
    DataConfig,
    InnerConfig,
    LinkConfig,
    OuterConfig,
    StreamConfig,
    dump,
    from_json,
    load,
    site_names,
    to_json,
)
from fedwan.config_tree import keys_of
from fedwan.errors import ConfigError


def test_words_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("h: 50\nsteps: 500\nouter:\n  generator:\n    momentum: 0.5\ndata:\n")
    config = load(path, ["h=20", "outer.generator.lr=3e-1", "link.rtt_ms=100", "h=10"])
    assert (config.h, config.steps, config.link.rtt_ms) == (10, 500, 100.0)
    assert config.outer == {"generator": OuterConfig(lr=0.3, momentum=0.5)}
    assert config.data == DataConfig()
    assert isinstance(config.link.rtt_ms, float)
    assert site_names(load(None, ["sites=[paris,rome]"])) == ["paris", "rome"]
    # Text is taken as it was typed, also where YAML would see a number or a truth value.
    config = load(None, ["out=2024", "data.split=dirichlet:0.5", "log.wandb=online", "workload=on"])
    assert (config.out, config.data.split, config.workload) == ("2024", "dirichlet:0.5", "on")
    for text in ("runs/\U0001f680", "a'b", "{a", "- a: b", "'x"):
        assert load(None, [f"out={text}"]).out == text
    path.write_text("log:\n  wandb: false\n")
    with pytest.raises(ConfigError, match="log.wandb = 'False' is none of disabled"):
        load(path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        # An unknown key names the nearest valid one.
        ("stepz=5", "'stepz' (= 5); did you mean 'steps'?"),
        ("codec.upp=bf16", "'codec.upp' (= 'bf16'); did you mean 'codec.up'?"),
        ("outer.generator.learning_rate=0.3", "in 'outer.generator' there are lr, momentum"),
        # A value of another type.
        ("steps=many", "steps = 'many' is no whole number; write it like 20"),
        ("data.flip=perhaps", "data.flip = 'perhaps' is neither true nor false"),
        ("steps=", "steps has no value; give one"),
        ("stream.tau=", "stream.tau has no value; give one, or null"),
        ("link.rtt_ms=[1]", "link.rtt_ms = [1] is no number; write it like 0.5"),
        ("sites=a,b", "write it like 4, or [paris,rome]"),
        ("data=digits", "data = 'digits' is a section, not a setting; it holds data.name"),
        ("outer.lr=0.3", "did you mean 'outer.NETWORK.lr'?"),
        ("model=3", "it holds model.NAME"),
        ("h", "'h' is no key=value"),
        ("steps={a", "steps = '{a' cannot be parsed"),
        ("seed=${nothing}", "seed: Interpolation key 'nothing' not found"),
        # A value that its setting does not take, or not beside others.
        ("sites=0", "sites = 0 is out of range; choose 1 to 10000"),
        ("link.rate_mbit=nan", "link.rate_mbit = nan"),
        ("inner.g.beta1=1", "1.0 is out of range; choose 0 or more and less than 1"),
        ("site.partition=weights", "site.partition = 'weights' needs site.processes=2"),
        ("link.listen=nowhere", "link.listen = 'nowhere' is no host:port"),
        ("link.listen=a:1 link.door=a:1", "link.door = 'a:1' is link.listen as well"),
        ("data.name=folder data.size=7", "data.size = 7 is out of range; choose 0, or 8 to 1024"),
        ("inner.g.name=sgd inner.g.beta2=0.5", "inner.g.beta2 = 0.5 needs another optimiser"),
        ("round.quorum=5", "round.quorum = 5 is out of range; choose 0 to sites"),
        ("round.merge=mean:2", "'mean:2' is none of mean"),
        ("round.merge=krum:0", "'krum:0' is none of"),
        ("inner.g.lr=0", "inner.g.lr = 0.0 is out of range; choose more than 0"),
        ("log.wandb=onlin", "did you mean 'online'?"),
        ("out=", "out = '' says nothing"),
        ("h=???", "h = '???' says nothing; give a value"),
        ("codec.up.x=1", "codec.up is one value, and has no x; write codec.up=VALUE"),
        ("network.g.exclude=[[1]]", "exclude = [[1]] is no list of names; write it like"),
        ("out=a\nb", r"out = 'a\nb' has a line break"),
        ("sites=[a,a]", "holds 'a' twice"),
        ("sites=[a,../b]", "holds '../b', which is no DNS label"),
    ],
)
def test_a_users_mistake_is_one_line_that_names_key_value_and_mend(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, words.split(" "))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist; did you mean 'runs.yaml'"),
        ("- a\n- b\n", "no key: value"),
        ("a: [", "cannot be read"),
        (f"a: {'[' * 2000}{']' * 2000}", "cannot be read: .* recursion"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(
    tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "run.yaml"
    (tmp_path / "runs.yaml").touch()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load(path, [])
    assert "run.yaml" in str(caught.value) and "\n" not in str(caught.value)


positive = st.floats(min_value=1e-300, max_value=1e300, allow_nan=False)
network = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
configs = st.builds(
    Config,
    seed=st.integers(0, 2**62),
    h=st.integers(0, 10**6),
    out=st.text(st.characters(codec="utf-8"), min_size=1).filter(
        lambda text: text.strip() and text.isprintable() and "$" not in text
    ),
    model=st.dictionaries(network, st.one_of(st.integers(), positive, st.booleans()), max_size=3),
    inner=st.dictionaries(network, st.builds(InnerConfig, lr=positive), max_size=3),
    outer=st.dictionaries(
        network, st.builds(OuterConfig, lr=positive, momentum=st.floats(0, 0.999)), max_size=3
    ),
    stream=st.builds(StreamConfig, tau=st.one_of(st.none(), st.integers(0, 10**6))),
    link=st.builds(LinkConfig, rate_mbit=positive, listen=st.sampled_from(["a.b:0", "a.b:1"])),
)


@settings(deadline=None, max_examples=8)
@given(configs)
def test_json_and_yaml_bring_every_section_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    assert from_json(to_json(config)) == config
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    dump(config, path)
    assert load(path, []) == config


@pytest.mark.parametrize("text", ["{", "[]", '{"stepz": 1}', '{"sites": 0}'])
def test_json_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        from_json(text)


@pytest.mark.parametrize("dollar", ["$", r"\u0024"])
def test_nothing_of_a_site_s_environment_gets_into_what_a_coordinator_sends(
    dollar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would come back to the coordinator, in the line on what is wrong."""
    monkeypatch.setenv("FEDWAN_SECRET", "hunter2")
    for key in ("device", "out"):
        with pytest.raises(ConfigError, match=r"holds '\$\{'") as caught:
            from_json(f'{{"{key}": "{dollar}{{oc.env:FEDWAN_SECRET}}"}}')
        assert "hunter2" not in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    for words in ("stepz=5 h=many link.rtt=3", "sites=0 seed=-1 device=gpu data.workers=99"):
        with pytest.raises(ConfigError) as caught:
            load(None, words.split())
        assert len(str(caught.value).splitlines()) == len(words.split())


def test_there_are_at_most_60_settings() -> None:
    assert len(keys_of(Config)) <= 60, "a new one retires another"
