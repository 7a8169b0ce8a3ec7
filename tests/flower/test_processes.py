from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fedwan.errors import UserError
from fedwan.flower.processes import (
    Service,
    find_tool,
    in_sessions,
    is_running,
    last_line,
    started_s,
    stop_all,
)

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)"
)
# Starts a child in a session of its own, as SuperLink does with its SuperExec.
PARENT = (
    "import subprocess, sys, time; "
    f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True); "
    "time.sleep(600)"
)


def python(code: str, log: Path) -> Service:
    return Service("it", [sys.executable, "-c", code], log)


def wait_for(what: Callable[[], object], patience_s: float = 10) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        if time.monotonic() > deadline:
            pytest.fail("it did not happen")
        time.sleep(0.02)


def is_up(service: Service) -> bool:
    return last_line(service.log) == "up"


def test_a_service_writes_to_its_log_and_leads_its_own_session(tmp_path: Path) -> None:
    service = python(SLEEPER, tmp_path / "logs" / "it.log")
    try:
        wait_for(lambda: is_up(service))
        assert os.getsid(service.pid) == service.pid
    finally:
        service.stop()
    assert service.poll() is not None


def test_stopping_ends_a_grandchild_in_another_session(tmp_path: Path) -> None:
    service = python(PARENT, tmp_path / "it.log")
    wait_for(lambda: is_up(service))
    wait_for(lambda: len(service.processes()) == 2)
    pids = service.processes()
    service.stop()
    assert not any(is_running(pid) for pid in pids)


def test_stopping_ends_a_grandchild_whose_parent_was_killed(tmp_path: Path) -> None:
    service = python(PARENT, tmp_path / "it.log")
    wait_for(lambda: is_up(service))
    wait_for(lambda: len(service.processes()) == 2)
    os.kill(service.pid, signal.SIGKILL)
    wait_for(lambda: service.poll() is not None)
    assert len(service.processes()) == 1
    service.stop()
    assert service.gone()


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    service = python(STUBBORN, tmp_path / "it.log")
    wait_for(lambda: is_up(service))
    begin = time.monotonic()
    service.stop(grace_s=0.3)
    assert 0.3 <= time.monotonic() - begin < 3
    assert service.poll() == -signal.SIGKILL


def test_services_share_one_grace(tmp_path: Path) -> None:
    services = [python(STUBBORN, tmp_path / f"{name}.log") for name in "abc"]
    for service in services:
        wait_for(lambda service=service: is_up(service))
    begin = time.monotonic()
    stop_all(services, grace_s=0.5)
    assert time.monotonic() - begin < 1.5
    assert all(service.gone() for service in services)


def test_a_service_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from fedwan.flower.processes import Service; "
        f"s = Service('it', [sys.executable, '-c', {SLEEPER!r}], Path({str(tmp_path / 'log')!r})); "
        "print(s.pid, flush=True); time.sleep(600)"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: last_line(tmp_path / "log") == "up")
        parent.kill()
    wait_for(lambda: not is_running(pid))


def test_an_early_death_is_told_with_its_last_words(tmp_path: Path) -> None:
    service = python("print('\\033[92mno such port\\033[0m\\n'); exit(3)", tmp_path / "it.log")
    wait_for(lambda: service.poll() is not None)
    text = str(service.death())
    assert text == f"it ended with status 3; last words: no such port (see {tmp_path / 'it.log'})"


def test_a_command_that_is_not_installed_is_one_line() -> None:
    with pytest.raises(UserError, match="'flower-nothing' is neither in .* nor on the PATH"):
        find_tool("flower-nothing")


def test_last_line_of_no_log_is_empty(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == ""


def test_a_dead_process_that_is_not_reaped_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid)
    child.communicate()
    assert not is_running(child.pid)


def test_processes_from_before_are_left_out() -> None:
    me = psutil.Process()
    sessions = {os.getsid(0)}
    assert me.pid in in_sessions(set(sessions), started_s(me))
    assert in_sessions(set(sessions), started_s(me) + 1e6) == []
