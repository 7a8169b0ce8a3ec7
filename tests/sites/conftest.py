"""Teachers to distil, trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedwan.app import load_run
from fedwan.config import dump
from fedwan.simulation import simulate
from tests.sites.support import DIT, MLP


def _teach(folder: Path, **model: Any) -> Path:
    """A run's folder with a flow in it, trained at one site."""
    words = ["workload=flow", "sites=1", "steps=4", "h=2", "data.batch=32", "eval.every=0"]
    asked = load_run(None, [*words, *(f"{key}={value}" for key, value in model.items())])
    simulate(asked, folder)
    dump(asked, folder / "config.yaml")
    return folder


@pytest.fixture(scope="session")
def mlp_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of points, not told their class."""
    model = {f"model.{key}": value for key, value in MLP.items()}
    return _teach(tmp_path_factory.mktemp("mlp"), **{"data.name": "ring8"}, **model)


@pytest.fixture(scope="session")
def dit_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of images, told their class."""
    model = {f"model.{key}": value for key, value in DIT.items()}
    return _teach(tmp_path_factory.mktemp("dit"), **model)
