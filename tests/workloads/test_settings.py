"""Filling in and refusing."""

from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.errors import ConfigError
from fedwan.workloads.settings import resolve_page


def page(**parts: object) -> ModuleType:
    given = {"NETWORKS": {"generator": "regression"}, "DEFAULTS": {"inner.*": InnerConfig()}}
    return cast(ModuleType, SimpleNamespace(**{**given, **parts}))


def test_a_setting_or_value_that_the_page_does_not_use_is_refused() -> None:
    config = Config()
    config.site.accumulate = 2
    with pytest.raises(ConfigError, match="site.accumulate = 2 has no effect with workload 'gan'"):
        resolve_page(page(), config)
    resolve_page(page(USES=("site.accumulate",)), config)
    config = Config()
    config.site.partition = "weights"
    with pytest.raises(ConfigError, match="site.partition = 'weights' does not go with"):
        resolve_page(page(USES=("site.partition",)), config)
    resolve_page(page(USES=("site.partition*",)), config)


def test_one_class_is_nothing_to_be_told() -> None:
    model = dataclasses.make_dataclass("Model", [("conditional", bool, False)])

    def resolved(**data: str) -> object:
        asked = Config(data=DataConfig("folder", path="/x", **data), model={"conditional": True})
        return resolve_page(page(Model=model, USES=("data.labels",)), asked)

    assert resolved(classes="cat,dog") and resolved(labels="site")
    with pytest.raises(ConfigError, match="needs data.classes=cat,dog or data.labels=site; set"):
        resolved()


def test_pairs_are_for_who_asks_for_them() -> None:
    asked = Config(data=DataConfig("photo_edges"))
    resolve_page(page(PAIRS=True), asked)
    with pytest.raises(ConfigError, match=r"'photo_edges' holds pairs .* set data.name=digits"):
        resolve_page(page(), asked)
    files = Config(data=DataConfig("folder", path="/x"))
    with pytest.raises(ConfigError, match="or data.name=pairs for files of yours"):
        resolve_page(page(PAIRS=True), files)
