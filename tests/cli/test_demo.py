"""`fedwan demo`: where it goes. The real thing is in `tests/cli/test_fleets.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedwan.cli import demo as demo_module
from fedwan.cli.demo import demo
from fedwan.errors import ConfigError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What would have been run, in a folder without runs."""
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        demo_module, "run_here", lambda path, words, resume: seen.append((path, words, resume))
    )
    return seen


def make_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "summary.json").touch()


def test_each_demo_gets_a_folder_of_its_own(calls: list[tuple[Any, ...]]) -> None:
    demo(["sites=2"])
    make_run(Path("runs/demo"))
    demo()
    assert calls == [
        (None, ["sites=2", "out=runs/demo"], False),
        (None, ["out=runs/demo-2"], False),
    ]


def test_a_folder_that_was_named_is_taken_as_it_is(calls: list[tuple[Any, ...]]) -> None:
    make_run(Path("runs/demo"))
    demo(["out=runs/demo", "h=5"])
    assert calls == [(None, ["out=runs/demo", "h=5"], False)]


def test_resuming_goes_on_with_the_latest_demo_and_its_settings(
    calls: list[tuple[Any, ...]],
) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        demo(resume=True)
    make_run(Path("runs/demo"))
    demo(resume=True)
    assert calls == [(Path("runs/demo/config.yaml"), ["out=runs/demo"], True)]
