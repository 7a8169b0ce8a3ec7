from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fedwan.config import Config, from_json
from fedwan.errors import CheckpointError, DiskFull, FedwanError, JoinRefused, LinkLost, RunStopped
from fedwan.flower.status import Start, Status


def test_a_status_is_read_as_it_was_written_and_a_broken_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "status.json"
    begun = Status.of()
    begun.write(path)
    assert Status.read(path) == begun
    assert begun.pid == os.getpid()
    assert not begun.is_gone and not begun.is_killed
    for text in ("", "{", "[]", '{"pid": 1}', "\x00"):
        path.write_text(text)
        assert Status.read(path) is None


def test_a_killed_process_is_silent_even_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    status = Status.of(child.pid)
    assert not status.is_killed
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert status.is_killed
    assert not replace(status, outcome="failed").is_killed
    child.communicate()
    assert status.is_killed


@pytest.mark.parametrize(
    ("error", "outcome", "back"),
    [
        (JoinRefused("weights\ndiffer"), "refused", JoinRefused("weights differ")),
        (RunStopped("enough"), "stopped", RunStopped("enough")),
        (LinkLost("gone"), "failed", LinkLost("gone")),
        (DiskFull("no room"), "failed", DiskFull("no room")),
        (KeyError("x"), "failed", FedwanError("KeyError: 'x'; the traceback is in logs/a.log")),
    ],
)
def test_an_error_comes_back_as_it_was_in_one_line(
    error: Exception, outcome: str, back: FedwanError
) -> None:
    ended = Status.of().ended(error)
    raised = ended.exception(Path("logs/a.log"))
    assert (ended.outcome, type(raised), str(raised)) == (outcome, type(back), str(back))


def test_an_orphan_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        right = Status.of(child.pid)
        replace(right, started_s=right.started_s + 10).write(tmp_path / "status")
        Status.end_orphan(tmp_path / "status")
        assert child.poll() is None
        right.write(tmp_path / "status")
        Status.end_orphan(tmp_path / "status")
        assert child.wait() == -signal.SIGKILL


def test_a_clock_that_is_set_changes_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status.of()
    assert replace(status, started_s=status.started_s - 10).is_killed  # another one of this id
    boot, create = psutil.boot_time, psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot() + 86400.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create(self) + 86400.0)
    assert not status.is_gone


def test_a_resumed_run_keeps_its_id_and_a_new_one_does_not(tmp_path: Path) -> None:
    def begin(resume: bool) -> Start:
        return Start.begin(Config(out=str(tmp_path)), Path("pki/coordinator"), resume=resume)

    (tmp_path / "flower").mkdir()
    for text in (None, "{}", "[1]"):
        if text:
            (tmp_path / "flower" / "start.json").write_text(text)
        with pytest.raises(CheckpointError, match="holds no run to go on with"):
            begin(True)
    first, resumed, second = begin(False), begin(True), begin(False)
    assert resumed.run_id == first.run_id != second.run_id
    assert resumed.resume and not first.resume
    assert Start.read(tmp_path) == second and Path(second.identity).is_absolute()
    assert from_json(second.config) == Config(out=str(tmp_path))
    (tmp_path / "flower" / "start.json").unlink()
    (tmp_path / "journal.jsonl").write_text('{"event":"start","run":"of the journal"}\n{}\n')
    assert begin(True).run_id == "of the journal"


ENDED = """
import os, signal, sys, time
from pathlib import Path
from fedwan.errors import FedwanError
from fedwan.flower.status import reported

folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, lambda *_: os._exit(3))  # as Flower's
try:
    with reported(folder / "log", folder / "status", folder / "service"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
except FedwanError:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_ends_with_its_service_says_so_and_a_later_signal_is_not_heard(
    tmp_path: Path, is_killed: bool
) -> None:
    service = Status.of()
    service = replace(service, started_s=service.started_s - 10) if is_killed else service
    service.write(tmp_path / "service")
    subprocess.run([sys.executable, "-c", ENDED, str(tmp_path)], check=True, timeout=60)
    status = Status.read(tmp_path / "status")
    says = f"the coordinator's service (process {service.pid}) was killed"
    assert status is not None and status.text == (says if is_killed else "ended by SIGTERM")
