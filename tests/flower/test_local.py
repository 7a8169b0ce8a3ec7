"""Whole runs through real SuperLinks and SuperNodes, with stand-ins for the training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedwan.flower import procfs
from fedwan.flower.control import Control
from fedwan.flower.environment import flower_environment
from fedwan.flower.processes import find_tool

pytestmark = pytest.mark.slow

DRIVE = Path(__file__).parent / "standin" / "drive.py"
REPOSITORY = Path(__file__).resolve().parents[2]


class Run:
    """A process that runs `run_local`, and what can be seen of it from outside."""

    def __init__(self, out: Path, app: Path, sites: int, *words: str) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVE), str(out), str(app), str(sites), *words],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self._sessions = {self.process.pid}

    def processes(self) -> list[procfs.ProcessStat]:
        """All live processes of the run, whatever sessions they moved to."""
        return procfs.in_sessions(self._sessions, 0)

    def seen(self, key: str) -> list[dict[str, Any]]:
        """What the stand-in coordinator wrote down that has this key."""
        path = self.out / "seen.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for line in lines if key in (entry := json.loads(line))]

    def wait_for_joins(self, count: int, patience_s: float = 90) -> float:
        """Seconds until so many sites have joined, rejoins included."""
        return wait_for(lambda: len(self.seen("joined")) >= count, patience_s)

    def end(self) -> tuple[int, str]:
        """Exit status and stderr, once it has ended."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def finish(self) -> None:
        """Let the run end, and see that it ends well."""
        (self.out / "finish").touch()
        code, errors = self.end()
        assert (code, errors) == (0, "")
        assert wait_for(lambda: not self.processes(), 10) < 10


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, standin_app: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(sites: int, *words: str) -> Run:
        run = Run(tmp_path / "out", standin_app, sites, *words)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        for process in run.processes():
            os.kill(process.pid, signal.SIGKILL)
        run.process.communicate()


def wait_for(what: Callable[[], object], patience_s: float) -> float:
    begin = time.monotonic()
    while not what():
        if time.monotonic() - begin > patience_s:
            pytest.fail(f"it did not happen within {patience_s} s")
        time.sleep(0.05)
    return time.monotonic() - begin


def test_each_site_gets_one_ticket_and_runs_the_bundles_code(start: Start) -> None:
    run = start(2)
    run.wait_for_joins(2)
    time.sleep(5)
    joins = run.seen("joined")
    assert sorted(join["joined"] for join in joins) == ["s1", "s2"]
    for join in joins:
        home = run.out / "sites" / join["joined"] / "flower" / "apps"
        assert Path(join["code"]).is_relative_to(home)
    begun = run.seen("identity")[0]
    assert Path(begun["code"]).is_relative_to(run.out / "flower" / "apps")
    assert begun["identity"] == str(run.out / "pki" / "coordinator")
    run.finish()
    assert (run.out / "logs" / "serverapp.log").stat().st_size > 0
    assert (run.out / "sites" / "s1" / "logs" / "clientapp.log").exists()


def test_a_site_comes_back_whatever_of_it_dies(start: Start) -> None:
    """Each in seconds on an idle machine; Flower alone takes a minute, or never notices."""
    run = start(1)
    run.wait_for_joins(1)
    os.kill(run.seen("joined")[0]["pid"], signal.SIGKILL)
    run.wait_for_joins(2, patience_s=40)
    os.kill(run.seen("joined")[1]["pid"], signal.SIGTERM)
    run.wait_for_joins(3, patience_s=40)
    assert "site s1: ended by SIGTERM" in (run.out / "logs" / "serverapp.log").read_text()
    os.kill(process_with(run, "flower-supernode").pid, signal.SIGKILL)
    run.wait_for_joins(4, patience_s=40)
    assert len({join["pid"] for join in run.seen("joined")}) == 4
    run.finish()


def test_flwr_run_through_the_door_starts_nothing(start: Start, tmp_path: Path) -> None:
    run = start(1)
    run.wait_for_joins(1)
    # The forwarder's port, as the SuperNode was told, leads to the door with the site's identity.
    words = command_of(process_with(run, "flower-supernode").pid)
    forwarder = words[words.index("--superlink") + 1]
    home = tmp_path / "intruder"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "door"\n\n[superlink.door]\naddress = "{forwarder}"\n'
        "insecure = true\n"
    )
    tried = subprocess.run(
        [find_tool("flwr"), "run", str(REPOSITORY), "door"],
        env=flower_environment(home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert tried.returncode != 0, tried.stdout + tried.stderr
    log = (run.out / "logs" / "coordinator.log").read_text()
    superlink = command_of(process_with(run, "flower-superlink").pid)
    port = superlink[superlink.index("--port") + 1]
    with Control(f"127.0.0.1:{port}") as control:
        assert len(control.runs()) == 1
    # The forwarder does not even let it out of the site; the door's own tests are in test_door.
    assert "v1/control" not in log
    site_log = (run.out / "sites" / "s1" / "logs" / "site.log").read_text()
    assert "/v1/control/start-run'; only Fleet calls pass" in site_log
    run.finish()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_run(start: Start, number: int) -> None:
    run = start(1)
    run.wait_for_joins(1)
    assert len(run.processes()) >= 8
    run.process.send_signal(number)
    code, errors = run.end()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 1, signal.SIGKILL: -9}[number], errors
    assert wait_for(lambda: not run.processes(), 20) < 20


def test_no_process_outlives_a_start_that_is_interrupted(start: Start) -> None:
    run = start(2)
    wait_for(lambda: len(run.processes()) > 4, 30)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert wait_for(lambda: not run.processes(), 20) < 20


def test_a_refused_site_ends_the_run_in_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "out" / "sites" / "s2").mkdir(parents=True)
    (tmp_path / "out" / "sites" / "s2" / "refuse-me").touch()
    run = start(2)
    code, errors = run.end()
    assert code == 2
    assert errors == ("fedwan: site s2: initial weights differ (stand-in); use the same seed\n")
    assert (
        "site s2 takes no part: initial weights differ"
        in (run.out / "logs" / "serverapp.log").read_text()
    )
    assert wait_for(lambda: not run.processes(), 10) < 10


def test_a_serverapps_error_arrives_as_it_was(start: Start, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "make-it-fail").touch()
    run = start(1)
    code, errors = run.end()
    assert (code, errors) == (
        2,
        "fedwan: the stand-in was told to fail; remove make-it-fail\n",
    )
    assert wait_for(lambda: not run.processes(), 10) < 10


def process_with(run: Run, word: str) -> procfs.ProcessStat:
    """The run's process that has a word in its command line."""
    return next(
        process
        for process in run.processes()
        if any(Path(part).name == word for part in command_of(process.pid)[:3])
    )


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
