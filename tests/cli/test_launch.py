"""Starting, showing and ending a run, with services that are a few lines long."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from rich.console import Console

from fedwan.cli.failures import Crashed
from fedwan.cli.launch import launch, load_config
from fedwan.config import Config
from fedwan.errors import ConfigError, RunStopped
from fedwan.output.outputs import Outputs
from tests.output.runs import make_config, write_run


def make_console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=110), stream


def test_a_run_that_ends_well_shows_its_summary(tmp_path: Path) -> None:
    def services(config: Config, stop: threading.Event) -> None:
        with Outputs(config, Path(config.out)) as outputs:
            write_run(outputs, finish=True)

    console, stream = make_console()
    launch(make_config(tmp_path), services, console)
    assert "done, round 2, step 20/20" in stream.getvalue()
    assert "Fréchet distance 0.9; real data itself 0.4" in stream.getvalue()


def test_what_the_services_raise_is_raised(tmp_path: Path) -> None:
    def services(config: Config, stop: threading.Event) -> None:
        raise ConfigError("link.listen = 80 is in use; choose another")

    with pytest.raises(ConfigError, match="is in use"):
        launch(make_config(tmp_path), services, make_console()[0])


def test_a_bug_in_the_services_leaves_its_traceback_in_the_runs_folder(tmp_path: Path) -> None:
    def services(config: Config, stop: threading.Event) -> None:
        raise IndexError("off by one")

    with pytest.raises(Crashed, match="off by one"):
        launch(make_config(tmp_path), services, make_console()[0])
    (crash,) = tmp_path.glob("crash-*.txt")
    assert "in services" in crash.read_text()


def test_sigterm_ends_the_services_in_order(tmp_path: Path) -> None:
    ended: list[bool] = []

    def services(config: Config, stop: threading.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(stop.wait(20))
        raise RunStopped("stopped from outside")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunStopped):
        launch(make_config(tmp_path), services, make_console()[0])
    assert ended == [True]
    assert signal.getsignal(signal.SIGTERM) is before


CTRL_C = """
    import sys, threading
    from pathlib import Path
    from rich.console import Console
    from fedwan.cli import main as main_module
    from fedwan.cli.launch import launch
    from fedwan.errors import RunStopped
    from fedwan.config import Config

    out = Path(sys.argv[1])

    def services(config, stop):
        (out / "started").touch()
        stop.wait(60)
        (out / "ended").touch()
        raise RunStopped("stopped")

    def app(words, prog_name, standalone_mode):
        launch(Config(h=1, out=str(out)), services, Console())

    main_module.app = app
    main_module.main([])
"""


def test_ctrl_c_ends_the_services_and_then_exits_with_130(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(CTRL_C), str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        argv, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "fedwan: stopped by Ctrl-C\n")
    assert "ending the services" in out
    assert (tmp_path / "ended").exists()


class TestLoadConfig:
    def test_a_new_run_gets_an_absolute_folder_and_nothing_left_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        config = load_config(None, ["out=here", "sites=2"], resume=False)
        assert config.out == str(tmp_path / "here")
        assert config.inner and config.outer and config.steps and config.h
        assert not (tmp_path / "here").exists()

    def test_a_folder_that_holds_a_run_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "summary.json").touch()
        with pytest.raises(ConfigError, match="holds a run already"):
            load_config(None, [f"out={tmp_path}"], resume=False)

    def test_there_must_be_something_to_resume(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="holds no checkpoint yet; leave --resume out"):
            load_config(None, [f"out={tmp_path}"], resume=True)

    def test_a_run_that_was_moved_goes_on_where_it_is(self, tmp_path: Path) -> None:
        config = load_config(None, [f"out={tmp_path / 'old'}"], resume=False)
        with Outputs(config, tmp_path / "old") as outputs:
            write_run(outputs, finish=True)
        (tmp_path / "old").rename(tmp_path / "new")
        resumed = load_config(tmp_path / "new" / "config.yaml", [], resume=True)
        assert resumed.out == str(tmp_path / "new")
        resumed.out = config.out
        assert resumed == config
