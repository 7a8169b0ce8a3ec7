from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedwan.errors import UserError
from fedwan.flower.processes import (
    Service,
    find_tool,
    flower_environment,
    last_line,
)
from tests.planes import eventually

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


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_up(service: Service) -> bool:
    return last_line(service.log) == "up"


def test_stopping_ends_a_grandchild_in_another_session(tmp_path: Path) -> None:
    service = python(PARENT, tmp_path / "it.log")
    eventually(lambda: is_up(service))
    eventually(lambda: len(service.processes()) == 2)
    pids = service.processes()
    service.stop()
    assert not any(is_running(pid) for pid in pids)


def test_stopping_ends_a_grandchild_whose_parent_was_killed(tmp_path: Path) -> None:
    service = python(PARENT, tmp_path / "it.log")
    eventually(lambda: is_up(service))
    eventually(lambda: len(service.processes()) == 2)
    os.kill(service.pid, signal.SIGKILL)
    eventually(lambda: service.poll() is not None)
    assert len(service.processes()) == 1
    service.stop()
    assert service.is_gone()


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    service = python(STUBBORN, tmp_path / "it.log")
    eventually(lambda: is_up(service))
    begin = time.monotonic()
    service.stop(grace_s=0.3)
    assert 0.3 <= time.monotonic() - begin < 3
    assert service.poll() == -signal.SIGKILL


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
        eventually(lambda: last_line(tmp_path / "log") == "up")
        parent.kill()
    eventually(lambda: not is_running(pid))


def test_an_early_death_is_told_with_its_last_words(tmp_path: Path) -> None:
    service = python("print('\\033[92mno such port\\033[0m\\n'); exit(3)", tmp_path / "it.log")
    eventually(lambda: service.poll() is not None)
    text = str(service.death())
    assert text == f"it ended with status 3; last words: no such port (see {tmp_path / 'it.log'})"


def test_a_command_that_is_not_installed_is_one_line() -> None:
    with pytest.raises(UserError, match="'flower-nothing' is neither in .* nor on the PATH"):
        find_tool("flower-nothing")


def test_flower_is_private_offline_and_deaf_to_the_users_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLWR_DATABASE", "elsewhere")
    monkeypatch.setenv("FLWR_HOME", "elsewhere")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.com")
    monkeypatch.setenv("NO_PROXY", "intranet.example.com")
    env = flower_environment(tmp_path / "home")
    assert "FLWR_DATABASE" not in env
    assert env["FLWR_HOME"] == str(tmp_path / "home")
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["NO_PROXY"] == "intranet.example.com,127.0.0.1,localhost"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
