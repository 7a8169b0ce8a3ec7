"""Filling in and refusing."""

from __future__ import annotations

import pytest

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.errors import ConfigError
from fedwan.workloads.settings import fill_inner, fill_training, require_at_least

DEFAULT = InnerConfig(lr=3e-3, beta1=0.0)


def test_what_the_user_left_open_is_filled_in() -> None:
    config = Config()
    fill_training(config, batch=32, steps=100)
    fill_inner(config, "generator", DEFAULT)
    assert (config.data.batch, config.steps, config.inner["generator"]) == (32, 100, DEFAULT)
    assert config.inner["generator"] is not DEFAULT


def test_what_the_user_set_stays() -> None:
    config = Config(steps=7, inner={"generator": InnerConfig(lr=0.5)})
    config.data.batch = 3
    fill_training(config, batch=32, steps=100)
    fill_inner(config, "generator", DEFAULT)
    assert (config.data.batch, config.steps) == (3, 7)
    assert config.inner["generator"] == InnerConfig(lr=0.5)


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (InnerConfig("adamm"), "inner.generator.name = 'adamm' is none of .*did you mean"),
        (InnerConfig("sgd", beta2=0.5), "inner.generator.beta2 = 0.5 has no effect on sgd"),
        (InnerConfig(schedule="cosin"), "inner.generator.schedule = 'cosin' .*did you mean"),
        (InnerConfig(state="averag"), "inner.generator.state = 'averag' .*did you mean 'average'"),
        (InnerConfig("sgd", beta1=0.0, state="reset"), "state = 'reset' has no effect on sgd with"),
        (InnerConfig(warmup_steps=101), "more than the run's steps; choose 100 or less"),
    ],
)
def test_an_optimiser_that_cannot_be_built_as_asked_is_refused(
    inner: InnerConfig, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        fill_inner(Config(steps=100, inner={"generator": inner}), "generator", DEFAULT)
    assert "\n" not in str(caught.value)


def test_a_model_setting_that_is_too_small_is_refused() -> None:
    require_at_least("model.width", 1, 1)
    with pytest.raises(ConfigError, match="model.width = 0 is out of range; choose 1 or more"):
        require_at_least("model.width", 0, 1)


def test_pairs_are_for_who_asks_for_them() -> None:
    asked = Config(data=DataConfig("photo_edges"))
    fill_training(asked, batch=4, steps=10, pairs=True)
    with pytest.raises(ConfigError, match=r"'photo_edges' holds pairs .* set data.name=digits"):
        fill_training(asked, batch=4, steps=10)
    with pytest.raises(ConfigError, match=r"'digits' holds no pairs .* set data.name=photo_edges"):
        fill_training(Config(), batch=4, steps=10, pairs=True)
