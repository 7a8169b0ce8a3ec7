"""The run's folder: no run overwrites another, and the right one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.cli.folders import (
    choose_demo_folder,
    holds_run,
    is_named,
    moved_folder,
    require_fresh,
)
from fedwan.errors import ConfigError


def make_run(folder: Path) -> Path:
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "coordinator.safetensors").touch()
    return folder


@pytest.mark.parametrize("name", ["summary.json", "checkpoint/coordinator.safetensors"])
def test_a_folder_with_a_checkpoint_or_a_summary_holds_a_run(tmp_path: Path, name: str) -> None:
    assert not holds_run(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert holds_run(tmp_path)


def test_what_a_start_that_failed_left_behind_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for name in ("metrics.jsonl", "config.yaml", "checkpoint/.coordinator.safetensors.tmp"):
        (tmp_path / name).touch()
    assert not holds_run(tmp_path)
    require_fresh(tmp_path)


def test_a_folder_that_holds_a_run_is_refused_with_both_mends(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds a run already.*--resume, or choose another out="):
        require_fresh(tmp_path / "run")
    require_fresh(tmp_path / "new")
    require_fresh(tmp_path)


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="is a file"):
        require_fresh(tmp_path / "run")


def test_demos_are_numbered(tmp_path: Path) -> None:
    default = tmp_path / "demo"
    assert choose_demo_folder(default, resume=False) == default
    make_run(default)
    assert choose_demo_folder(default, resume=False) == tmp_path / "demo-2"
    make_run(tmp_path / "demo-2")
    assert choose_demo_folder(default, resume=False) == tmp_path / "demo-3"


def test_a_folder_that_a_failed_start_left_empty_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "demo" / "logs").mkdir(parents=True)
    assert choose_demo_folder(tmp_path / "demo", resume=False) == tmp_path / "demo"


def test_resuming_takes_the_latest_demo(tmp_path: Path) -> None:
    default = tmp_path / "demo"
    with pytest.raises(ConfigError, match="holds no run to go on with; leave --resume out"):
        choose_demo_folder(default, resume=True)
    make_run(default)
    make_run(tmp_path / "demo-2")
    (tmp_path / "demo-3").mkdir()
    assert choose_demo_folder(default, resume=True) == tmp_path / "demo-2"


def test_a_word_names_its_own_key_alone() -> None:
    assert is_named("out", ["h=3", "out=x"])
    assert not is_named("out", ["outer.generator.lr=3", "log.project=out"])


def test_a_run_that_was_moved_is_where_its_config_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "moved")
    assert moved_folder(run / "config.yaml") == run
    assert moved_folder(run / "other.yaml") is None
    assert moved_folder(tmp_path / "config.yaml") is None
