"""Whole runs through real SuperLinks and SuperNodes, of a script of a few numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedwan.flower.control import Control
from fedwan.flower.processes import find_tool, flower_environment
from tests.flower.fleet import REPOSITORY, STANDIN, Fleet, command_of, joins, wait_for

pytestmark = pytest.mark.slow


class Run(Fleet):
    """A process that runs `run_local`."""

    def __init__(self, out: Path, sites: int, *words: str) -> None:
        super().__init__()
        self.out = out
        self.process = self.start(str(STANDIN / "drive.py"), str(out), str(sites), *words)

    def wait_for_joins(self, count: int, patience_s: float = 90) -> None:
        """Until so many scripts have joined, rejoins included."""
        wait_for(lambda: len(joins(self.out)) >= count, patience_s)

    def end(self) -> tuple[int, str]:
        """Exit status and stderr, once it has ended and left nothing running."""
        _, errors = self.process.communicate(timeout=60)
        wait_for(lambda: not self.pids(), 20)
        return self.process.returncode, errors

    def finish(self) -> None:
        """Let the run end, and see that it ends well."""
        (self.out / "finish").touch()
        assert self.end() == (0, "")


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(sites: int, *words: str) -> Run:
        runs.append(Run(tmp_path / "out", sites, *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
        run.process.communicate()


def test_a_site_comes_back_whatever_of_it_dies(start: Start) -> None:
    """Each in seconds on an idle machine; Flower alone takes a minute, or never notices."""
    run = start(1)
    run.wait_for_joins(1)
    wait_for(lambda: list((run.out / "sites" / "s1").rglob("*.safetensors")))
    os.kill(joins(run.out)[0]["pid"], signal.SIGKILL)
    run.wait_for_joins(2, patience_s=60)
    status = run.out / "sites" / "s1" / "clientapp.json"
    os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)
    run.wait_for_joins(3, patience_s=60)
    os.kill(run.pid_with("flower-supernode"), signal.SIGKILL)
    run.wait_for_joins(4, patience_s=60)
    assert len({join["pid"] for join in joins(run.out)}) == 4
    assert {join["step"] for join in joins(run.out)[1:]} == {2}
    run.finish()
    assert json.loads((run.out / "summary.json").read_text())["rejoins"] == 3


def test_flwr_run_through_the_door_starts_nothing(start: Start, tmp_path: Path) -> None:
    run = start(1)
    run.wait_for_joins(1)
    # The forwarder's port, as the SuperNode was told, leads to the door with the site's identity.
    words = command_of(run.pid_with("flower-supernode"))
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
    superlink = command_of(run.pid_with("flower-superlink"))
    with closing(Control(f"127.0.0.1:{superlink[superlink.index('--port') + 1]}")) as control:
        assert len(control.runs()) == 1
    # The forwarder does not even let it out of the site; the door's own tests are in test_door.
    assert "v1/control" not in (run.out / "logs" / "coordinator.log").read_text()
    site_log = (run.out / "sites" / "s1" / "logs" / "site.log").read_text()
    assert "/v1/control/start-run'; only Fleet calls pass" in site_log
    run.finish()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_run(start: Start, number: int) -> None:
    run = start(1)
    run.wait_for_joins(1)
    assert len(run.pids()) >= 9
    run.process.send_signal(number)
    code, errors = run.end()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 1, signal.SIGKILL: -9}[number], errors


def test_sites_that_differ_end_the_run_in_one_line_that_names_both(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "s2-differs").touch()
    code, errors = start(2).end()
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "s2 differs from s1: its initial weights hash to" in errors


def test_a_killed_coordinator_is_noticed_and_resumes_under_its_run_id(start: Start) -> None:
    run = start(1)
    run.wait_for_joins(1)
    wait_for(lambda: (run.out / "checkpoint" / "coordinator.safetensors").exists(), 30)
    begun = run.out / "flower" / "start.json"
    first = json.loads(begun.read_text())["run_id"]
    os.kill(run.pid_with("flwr-serverapp"), signal.SIGKILL)
    code, errors = run.end()
    assert code == 1 and errors.count("\n") == 1
    assert "was killed; go on from the last checkpoint with --resume" in errors
    again = start(1, "resume")
    again.wait_for_joins(2)
    assert json.loads(begun.read_text())["run_id"] == first
    again.finish()
