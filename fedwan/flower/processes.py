"""Long-lived child processes: logged to a file, ended with us and with all their children.

Each service leads a session of its own, so a Ctrl-C at the terminal reaches only us and we end the
services in order. Flower's SuperLink starts its SuperExec in yet another session, and a
grandchild outlives a parent that was killed; so each service has a variable in its environment that
all of its descendants inherit, and by which they are found.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from fedwan.errors import FedwanError, UserError

__all__ = ["Service", "find_tool", "flower_environment", "last_line", "our_environment", "stop_all"]

_STARTER = Path(__file__).with_name("die_with_parent.py")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_VARIABLE = "FEDWAN_SERVICES"
"""Of the services that a process belongs to."""


class Service:
    """A running child process and everything it starts.

    Its output is appended to `log`; `env` is its whole environment.

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
        self._id = uuid.uuid4().hex
        given = dict(os.environ if env is None else env)
        given[_VARIABLE] = f"{given.get(_VARIABLE, '')} {self._id}"
        log.parent.mkdir(parents=True, exist_ok=True)
        starter = [sys.executable, "-I", "-S", str(_STARTER), str(os.getpid())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*starter, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=given,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the service itself."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status once it has ended, None while it runs."""
        return self._process.poll()

    def processes(self) -> list[int]:
        """Ids of its live processes, its own included."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # gone meanwhile, a zombie, or somebody else's
                ours = self._id in process.environ().get(_VARIABLE, "")
                # A program that sets its title writes over its environment.
                if ours or os.getsid(process.pid) == self.pid:
                    found.append(process.pid)
        return found

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

    def is_gone(self) -> bool:
        """Whether nothing of it is left."""
        return self.poll() is not None and not self.processes()


def stop_all(services: Sequence[Service], grace_s: float = 5.0) -> None:
    """End services and all their children together: SIGTERM, a grace, then SIGKILL.

    Those that have ended already are swept for orphans.
    """
    left = list(services)
    for service in left:
        service.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := [s for s in left if not s.is_gone()]) and time.monotonic() < deadline + 5.0:
        # Again and again: a process may start another between our look and our signal.
        for service in left if time.monotonic() > deadline else []:
            service.send(signal.SIGKILL)
        time.sleep(0.05)


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


def our_environment() -> dict[str, str]:
    """Our variables, such that a Python finds the very package that is running now."""
    paths = (_PACKAGE_ROOT, os.environ.get("PYTHONPATH", ""))
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def flower_environment(home: Path) -> dict[str, str]:
    """Variables for a Flower process, private and offline, with its own FLWR_HOME.

    Flower takes these settings from nowhere else. Variables of the user's that would change its
    behaviour behind our back (`FLWR_…`) are dropped.
    """
    env = {key: value for key, value in our_environment().items() if not key.startswith("FLWR_")}
    env |= {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Seconds between two looks of a SuperExec for a task to start; Flower's own is 1.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        # SuperExec finds the apps' commands by name: this Python's come first.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    for key in ("NO_PROXY", "no_proxy"):  # it talks over loopback, which no proxy must see
        env[key] = ",".join(filter(None, (env.get(key, ""), "127.0.0.1", "localhost")))
    return env
