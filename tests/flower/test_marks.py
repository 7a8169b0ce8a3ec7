from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fedwan.errors import FedwanError, JoinRefused, LinkLost, RunStopped
from fedwan.flower import marks
from fedwan.flower.marks import Mark, Signalled, end_orphan, ended, read_mark, write_mark
from fedwan.flower.processes import started_s


def mark_of(pid: int) -> Mark:
    return Mark(pid, started_s(psutil.Process(pid)), "run-1", "running")


def test_a_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "mark.json"
    begun = marks.start(path, "run-1")
    assert read_mark(path) == begun
    assert begun.pid == os.getpid()
    assert not begun.gone and not begun.silent


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\x00"])
def test_a_broken_mark_is_no_mark(tmp_path: Path, text: str) -> None:
    (tmp_path / "mark.json").write_text(text)
    assert read_mark(tmp_path / "mark.json") is None


def test_a_killed_process_is_silent_even_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = mark_of(child.pid)
    assert not mark.silent
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert mark.silent
    assert not replace(mark, outcome="failed").silent
    child.communicate()
    assert mark.silent


def test_another_process_under_the_same_id_is_not_taken_for_it() -> None:
    mark = mark_of(os.getpid())
    assert replace(mark, started_s=mark.started_s - 10).silent


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "done"),
        (JoinRefused("weights differ"), "refused"),
        (RunStopped("enough"), "stopped"),
        (Signalled("ended by SIGTERM"), "failed"),
        (LinkLost("gone"), "failed"),
        (ValueError("a bug"), "failed"),
    ],
)
def test_an_end_has_its_outcome(error: BaseException | None, outcome: str) -> None:
    assert ended(mark_of(os.getpid()), error).outcome == outcome


@pytest.mark.parametrize("error", [JoinRefused("weights\ndiffer"), LinkLost("gone")])
def test_our_errors_come_back_as_they_were_in_one_line(error: FedwanError) -> None:
    back = ended(mark_of(os.getpid()), error).exception(Path("log"))
    assert type(back) is type(error)
    assert str(back) == " ".join(str(error).split())


def test_a_signal_comes_back_as_a_stop() -> None:
    back = ended(mark_of(os.getpid()), Signalled("ended by SIGTERM")).exception(Path("log"))
    assert type(back) is RunStopped


def test_a_bug_comes_back_with_the_log_that_holds_its_traceback() -> None:
    back = ended(mark_of(os.getpid()), KeyError("x")).exception(Path("logs/a.log"))
    assert type(back) is FedwanError
    assert str(back) == "KeyError: 'x'; the traceback is in logs/a.log"


def test_an_orphan_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    path = tmp_path / "mark.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        right = mark_of(child.pid)
        write_mark(path, replace(right, started_s=right.started_s + 10))
        end_orphan(path)
        assert child.poll() is None
        write_mark(path, right)
        end_orphan(path)
        assert child.wait() == -signal.SIGKILL


def test_no_mark_is_no_orphan(tmp_path: Path) -> None:
    end_orphan(tmp_path / "none.json")


def test_a_clock_that_is_set_changes_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = mark_of(os.getpid())
    boot, create = psutil.boot_time, psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot() + 86400.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create(self) + 86400.0)
    assert not mark.gone
