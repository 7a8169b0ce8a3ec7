from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fedwan.errors import ConfigError, DiskFull, FedwanError, ProcessLost, RunStopped
from fedwan.flower.processes import (
    Backoff,
    Service,
    flower_environment,
    last_line,
    log_to,
    only_one,
    serving,
)
from tests.planes import eventually, in_thread

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
    return Service("it", [sys.executable, "-c", code], log, os.environ)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_up(service: Service) -> bool:
    return last_line(service.log) == "up"


@pytest.mark.parametrize("is_killed", [False, True])
def test_stopping_ends_a_grandchild_in_another_session(tmp_path: Path, is_killed: bool) -> None:
    service = python(PARENT, tmp_path / "it.log")
    eventually(lambda: is_up(service) and len(service.processes()) == 2)
    pids = service.processes()
    if is_killed:
        os.kill(service.pid, signal.SIGKILL)
        eventually(lambda: service.poll() is not None)
        assert len(service.processes()) == 1
    service.stop(5.0)
    eventually(lambda: not any(is_running(pid) for pid in pids))  # init may be slow to reap it


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


def test_the_first_failure_is_mended_at_once_and_the_next_ones_ever_later() -> None:
    backoff = Backoff(longest_s=5.0)
    assert [backoff.wait_s(1.0) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.wait_s(61.0) == backoff.wait_s(1.0) == 0.0


def test_what_ignores_sigterm_is_killed_after_the_grace_and_told_with_its_last_words(
    tmp_path: Path,
) -> None:
    service = python(STUBBORN, tmp_path / "it.log")
    eventually(lambda: is_up(service))
    begin = time.monotonic()
    service.stop(grace_s=0.3)
    assert 0.3 <= time.monotonic() - begin < 3
    log = tmp_path / "it.log"
    assert str(service.death()) == f"it ended with signal SIGKILL; last words: up (see {log})"


def test_last_words_are_none_of_fedwan_s_own_lines_but_its_warnings(tmp_path: Path) -> None:
    log, begin = tmp_path / "it.log", "2026-11-28 09:52:19,123"
    own = f"{begin} INFO fedwan.site.site: waiting: all sites are here\n"
    log.write_text(own)
    assert last_line(log) == ""
    log.write_text(f"CUDA error\n{own}")
    assert last_line(log) == "CUDA error"
    log.write_text(f"{own}{begin} WARNING fedwan.site.site: the disk is full\n")
    assert last_line(log).endswith("the disk is full")


def test_what_a_process_holds_and_has_started_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from fedwan.flower.processes import Service, only_one\n"
        f"argv, log = [sys.executable, '-c', {SLEEPER!r}], Path({str(tmp_path / 'log')!r})\n"
        "s = Service('it', argv, log, os.environ)\n"
        f"with only_one(Path({str(tmp_path)!r}), 'dir'): print(s.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    ) as parent:
        pid = int(parent.stdout.readline())
        eventually(lambda: last_line(tmp_path / "log") == "up")
        with pytest.raises(ConfigError, match=r"dir .* is in use by another service"):
            with only_one(tmp_path, "dir"):
                pass
        parent.kill()
    eventually(lambda: not is_running(pid))
    with only_one(tmp_path, "dir"):
        pass
    with pytest.raises(ConfigError, match="cannot be written"):
        with only_one(tmp_path / "log" / "state", "dir"):
            pass


def test_a_folder_is_waited_for_with_one_line_as_a_killed_parent_leaves_a_service_for_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    may_end, folder = tmp_path / "may-end", tmp_path / "dir"
    code = (
        "import time; from pathlib import Path; from fedwan.flower.processes import only_one\n"
        f"with only_one(Path({str(folder)!r}), 'dir'):\n"
        " print('up', flush=True); end = time.time() + 30\n"
        f" while not Path({str(may_end)!r}).exists() and time.time() < end: time.sleep(0.01)"
    )
    log = tmp_path / "it.log"
    orphan = Service("it", [sys.executable, "-c", code], log, flower_environment(tmp_path))
    eventually(lambda: is_up(orphan))
    with pytest.raises(ConfigError, match="in use"), only_one(folder, "dir", 0.1):
        pass
    caplog.clear()
    told = f"dir {folder} is in use by another service; waiting up to 20 s for its end"
    in_thread(lambda: (eventually(lambda: told in caplog.messages), may_end.touch()))
    with serving(folder, "dir", "a.log", patience_s=20.0):
        eventually(lambda: orphan.poll() == 0)
    assert caplog.messages == [told]


def test_a_log_that_was_renamed_is_begun_anew(tmp_path: Path) -> None:
    path, log = tmp_path / "site.log", logging.getLogger("fedwan")
    with log_to(path, echo=False):
        log.info("one")
        path.rename(tmp_path / "site.log.1")
        log.info("two …")
    for name, word in (("site.log.1", "one"), ("site.log", "two …")):
        (line,) = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        assert line.endswith(word)


def test_a_full_disk_is_blamed_for_what_is_not_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    usage = SimpleNamespace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    no_space, killed = OSError(errno.ENOSPC, "No space left"), ProcessLost("it was killed")
    for error, free, raised in (
        (killed, 0, DiskFull),
        (FedwanError("it failed"), 0, DiskFull),
        (no_space, 2**30, DiskFull),
        (killed, 10**9, ProcessLost),
        (RunStopped("told to"), 0, RunStopped),
    ):
        usage.free = 10**9
        with pytest.raises(raised) as caught, serving(tmp_path, "dir", "a.log"):
            usage.free = free
            raise error
        assert type(caught.value) is raised
    usage.free = 0  # it does not start then
    with pytest.raises(DiskFull), serving(tmp_path, "dir", "a.log"):
        pass
    with log_to(Path("/dev/full"), echo=False):
        logging.getLogger("fedwan").info("a line that has no room")
    assert capfd.readouterr().err == ""
