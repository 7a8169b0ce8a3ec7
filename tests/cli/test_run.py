"""`fedwan run` and `fedwan report` on a run that is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.cli.launch import load_config
from fedwan.cli.main import main
from fedwan.output.outputs import Outputs
from tests.output.runs import write_run


def fedwan(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    out = tmp_path / "run"
    with Outputs(load_config(None, [f"out={out}", "sites=2"], resume=False), out) as outputs:
        write_run(outputs, finish=True)
    return out


def test_resuming_a_run_that_is_done_shows_its_summary(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedwan("run", str(finished / "config.yaml"), "--resume") == 0
    assert "Fréchet distance" in capsys.readouterr().out


def test_starting_it_again_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedwan("run", str(finished / "config.yaml")) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_report_is_made_anew_and_its_path_printed(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "report.html").unlink()
    assert fedwan("report", str(finished)) == 0
    assert capsys.readouterr().out == f"{finished / 'report.html'}\n"
    assert (finished / "report.html").exists()
