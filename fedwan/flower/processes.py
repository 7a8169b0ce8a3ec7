"""Long-lived child processes: logged to a file, ended with us and with all their children.

Each service leads a session of its own, so a Ctrl-C at the terminal reaches only us and we end the
services in order. Flower's SuperLink starts its SuperExec in yet another session, and a
grandchild outlives a parent that was killed; `Service` therefore remembers sessions, which a
process keeps when its parents die, and ends every process in them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from fedwan.errors import FedwanError, UserError

__all__ = [
    "Service",
    "find_tool",
    "in_sessions",
    "is_running",
    "last_line",
    "started_s",
    "stop_all",
]

_STARTER = Path(__file__).with_name("die_with_parent.py")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def started_s(process: psutil.Process) -> float:
    """When a process started, in seconds since boot: a clock that is set does not change it.

    Raises:
        psutil.NoSuchProcess: it is gone.
    """
    return float(process.create_time() - psutil.boot_time())


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that is not yet reaped has."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def in_sessions(sessions: set[int], since_s: float = 0.0) -> list[int]:
    """Ids of the live processes of these sessions, their descendants, and the sessions they opened.

    Args:
        sessions: ids of session leaders; sessions that are found on the way are added to it, so
            that a later call finds their members even when the process that linked them is gone.
        since_s: as `started_s`; processes that started more than a second before are not ours.
    """
    session_of: dict[int, int] = {}
    parent_of: dict[int, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if started_s(process) > since_s - 1.0:
                session_of[process.pid] = os.getsid(process.pid)
                parent_of[process.pid] = process.ppid()
    while True:
        members = {pid for pid, session in session_of.items() if session in sessions}
        grown = sessions | {
            session_of[pid] for pid, parent in parent_of.items() if parent in members
        }
        if grown == sessions:
            return [pid for pid in members if is_running(pid)]
        sessions |= grown


def find_tool(name: str) -> str:
    """Path of a command that is installed with this Python.

    Raises:
        UserError: it is neither beside this Python nor on the PATH.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UserError(
            f"command {name!r} is neither in {beside.parent} nor on the PATH; "
            "install fedwan's dependencies into this environment (pip install fedwan)"
        )
    return found


def last_line(log: Path) -> str:
    """The last line of a log that says something, without colours; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [_ESCAPES.sub("", line).strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")


class Service:
    """A running child process and everything it starts.

    Args:
        name: how messages call it.
        argv: the program and its arguments.
        log: file that takes its output; appended to, folders are made.
        env: its whole environment, None for ours.
        folder: where it starts, None for ours.

    The kernel ends the child when the *thread* that made it ends: start services from a thread
    that lives as long as they should.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.started_at = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        starter = [sys.executable, "-I", "-S", str(_STARTER), str(os.getpid())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*starter, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                cwd=folder,
                start_new_session=True,
            )
        self._sessions = {self._process.pid}
        self._since_s = started_s(psutil.Process(self._process.pid))

    @property
    def pid(self) -> int:
        """Process id of the service itself."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status once it has ended, None while it runs."""
        return self._process.poll()

    def processes(self) -> list[int]:
        """Ids of its live processes, its own included; also learns the sessions they opened."""
        return in_sessions(self._sessions, self._since_s)

    def death(self) -> FedwanError:
        """The error that says that it ended, how, and its last words."""
        code = self.poll()
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"status {code}"
        words = last_line(self.log) or "none"
        return FedwanError(f"{self.name} ended with {how}; last words: {words} (see {self.log})")

    def stop(self, grace_s: float = 5.0) -> None:
        """End it and everything it started: SIGTERM, a grace, then SIGKILL."""
        stop_all([self], grace_s)

    def send(self, number: int) -> None:
        """Send a signal to each of its processes."""
        for pid in self.processes():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def gone(self) -> bool:
        """Whether nothing of it is left."""
        return self.poll() is not None and not self.processes()


def stop_all(services: Sequence[Service], grace_s: float = 5.0) -> None:
    """End services and all their children together: SIGTERM, a grace, then SIGKILL.

    Args:
        services: in any order; those that have ended already are swept for orphans.
        grace_s: seconds they get to end by themselves.
    """
    left = [service for service in services if not service.gone()]
    for service in left:
        service.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := [s for s in left if not s.gone()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + 5.0
    while (left := [s for s in left if not s.gone()]) and time.monotonic() < deadline:
        # Again and again: a process may start another between our look and our signal.
        for service in left:
            service.send(signal.SIGKILL)
        time.sleep(0.05)
