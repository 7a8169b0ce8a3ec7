"""`fedwan demo`: where it goes, and (slow) the real thing from start to summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedwan.cli import demo as demo_module
from fedwan.cli.demo import demo
from fedwan.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


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


def fedwan(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedwan", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_stopped_by_ctrl_c_goes_on_with_resume(tmp_path: Path) -> None:
    process = fedwan("demo", "sites=2", "steps=160", "eval.every=0", cwd=tmp_path)
    metrics = tmp_path / "runs" / "demo" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"kind":"round"') >= 6):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "fedwan: stopped by Ctrl-C\n")
    assert not (tmp_path / "runs" / "demo" / "summary.json").exists()

    again = fedwan("run", "runs/demo/config.yaml", cwd=tmp_path)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 2 and "--resume" in err and err.count("\n") == 1

    resumed = fedwan("demo", "--resume", cwd=tmp_path)
    out, err = resumed.communicate(timeout=400)
    assert (resumed.returncode, err) == (0, "")
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert (summary["rounds"], summary["contributions"]) == (8, 16)
    assert "resumed at version" in out
