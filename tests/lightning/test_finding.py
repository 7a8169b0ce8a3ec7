"""LightningModules by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.lightning.finding import find_class, lightning_of, make_module
from tests.lightning.modules import Autoencoder, DigitsGan

HERE = "tests.lightning.modules"


def test_a_class_is_found_made_and_known_by_its_lightning() -> None:
    assert find_class(f"{HERE}:DigitsGan") is DigitsGan
    assert make_module(f"{HERE}:Autoencoder", {"size": 3}).encoder.out_features == 3
    assert lightning_of(Autoencoder) == "pytorch_lightning"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "model.module = '' names no class; write it like"),
        ("DigitsGan", "names no class; write it like"),
        (f"{HERE}:DigitGan", "has no LightningModule 'DigitGan'; .*did you mean 'DigitsGan'?"),
        (f"{HERE}:nn", "has no LightningModule 'nn'"),
        ("tests.lightning.model:Gan", "no module 'tests.lightning.model'; put it into .*sites/_"),
        ("nowhere.at.all:Gan", "there is no module 'nowhere'; put it into"),
        ("fedwan.config:Config", "has no LightningModule 'Config'; it holds none"),
        (f"{HERE}:WithoutConfigure", "defines no configure_optimizers; add one"),
    ],
)
def test_what_is_no_class_that_can_be_trained_is_refused_in_one_line(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make_module(path, {})
    assert "\n" not in str(caught.value)


def test_arguments_that_do_not_fit_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="'widht'; it takes latents, width, lr"):
        make_module(f"{HERE}:DigitsGan", {"widht": 3})


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("pytorch_lightning", r"pip install 'fedwan\[lightning\]'"),
        ("some_library", "imports 'some_library', which is not installed; install it"),
    ],
)
def test_what_a_users_file_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, text: str
) -> None:
    (tmp_path / f"of_a_user_{missing}.py").write_text(f"import {missing}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if missing == "pytorch_lightning":
        monkeypatch.setitem(__import__("sys").modules, missing, None)
    with pytest.raises(ConfigError, match=text):
        find_class(f"of_a_user_{missing}:Gan")
