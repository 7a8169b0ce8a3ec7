from __future__ import annotations

import os
import subprocess
import sys

from fedwan.flower import procfs


def test_a_process_is_its_parents_child_in_its_session() -> None:
    found = procfs.stat(os.getpid())
    assert found is not None
    assert (found.pid, found.parent) == (os.getpid(), os.getppid())
    assert found.session == os.getsid(0)
    assert found.alive
    assert found in procfs.list_processes() or any(
        p.pid == found.pid for p in procfs.list_processes()
    )


def test_a_dead_process_that_is_not_reaped_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    found = procfs.stat(child.pid)
    assert found is not None and not found.alive
    child.wait()
    child.stdout.close()
    assert procfs.stat(child.pid) is None


def test_a_command_with_brackets_and_blanks_does_not_confuse(tmp_path: object) -> None:
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') S 1 (x', 0, 0, 0); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        found = procfs.stat(child.pid)
        assert found is not None and found.parent == os.getpid()
        assert child.stdin is not None
        child.stdin.close()


def test_processes_from_before_are_left_out() -> None:
    me = procfs.stat(os.getpid())
    assert me is not None
    sessions = {me.session}
    assert me.pid in {p.pid for p in procfs.in_sessions(set(sessions), 0)}
    assert procfs.in_sessions(set(sessions), 1 << 62) == []
