"""Long-lived processes: what a service does around its work, and the children that it starts.

A service has a folder of its own, a log, ports, and a way to be stopped. Each child leads a session
of its own, so a Ctrl-C at the terminal reaches only us and we end the children in order. Flower's
SuperLink starts its SuperExec in yet another session, and a grandchild outlives a parent that was
killed; so each child has a variable in its environment that all of its descendants inherit, and by
which they are found.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from logging.handlers import WatchedFileHandler
from pathlib import Path
from types import FrameType

import psutil
from filelock import FileLock, Timeout

from fedwan.config import host_and_port
from fedwan.errors import ConfigError, FedwanError, ProcessLost, last_own
from fedwan.files import disk_full, no_room, on_disk

_STARTER = Path(__file__).with_name("die_with_parent.py")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_VARIABLE = "FEDWAN_SERVICES"
_LASTED_S = 60.0

_log = logging.getLogger(__name__)


class Service:
    """A running child process and everything it starts, its output appended to `log`.

    It has the sockets `inherited`, under the numbers that they have here.

    The kernel ends the child when the *thread* that made it ends: start services from a thread
    that lives as long as they should.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        folder: str | None = None,
        inherited: Sequence[socket.socket] = (),
    ) -> None:
        self.name = name
        self.log = log
        self.started_at = time.monotonic()
        self._id = uuid.uuid4().hex
        given = {**env, _VARIABLE: f"{env.get(_VARIABLE, '')} {self._id}"}
        log.parent.mkdir(parents=True, exist_ok=True)
        starter = [sys.executable, "-I", "-S", str(_STARTER), str(os.getpid())]
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 (words of our own, or of the site's owner)
                [*starter, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=given,
                cwd=folder,
                start_new_session=True,
                pass_fds=[sock.fileno() for sock in inherited],
            )
        self.pid = process.pid
        self.poll = process.poll
        """Exit status once it has ended, None while it runs."""

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

    def stop(self, grace_s: float) -> None:
        """End it and everything it started: SIGTERM, a grace, then SIGKILL."""
        stop_all([self], grace_s)


def stop_all(services: Sequence[Service], grace_s: float) -> None:
    """End services and all their children together: SIGTERM, a grace, then SIGKILL.

    Those that have ended already are swept for orphans.
    """
    left, deadline = list(services), time.monotonic() + grace_s
    _send(left, signal.SIGTERM)
    while time.monotonic() < deadline + 5.0:
        if not (left := [s for s in left if s.poll() is None or s.processes()]):
            return
        # Again and again: a process may start another between our look and our signal.
        if time.monotonic() > deadline:
            _send(left, signal.SIGKILL)
        time.sleep(0.05)


def _send(services: Sequence[Service], number: int) -> None:
    for pid in [pid for service in services for pid in service.processes()]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


_FRAME = ("===", "---", "exitcode  :", "error_file:", "traceback :")
"""What torchrun puts around a process's exit code."""
_OWN_INFO = re.compile(r"\S+ \S+ INFO fedwan\.")
"""How a line begins that fedwan has logged in a training process: all was well then."""


_PLACE = re.compile(r'  File "(.+)", line (\d+)')
"""What a traceback says of a frame, or a SyntaxError of its place."""


def last_line(log: Path, *, is_placed: bool = False) -> str:
    """The last line of a log that says something, without colours; empty if there is none.

    With where in the user's own files that was, if it ends a traceback.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [_ESCAPES.sub("", line).rstrip() for line in text.splitlines()]
    told = [line for line in lines if line and not line.strip().startswith(_FRAME)]
    told = [line for line in told if not _OWN_INFO.match(line)]
    if not told:
        return ""
    above = [*takewhile(lambda line: line.startswith(" "), reversed(told[:-1]))]
    places = [(found[1], found[2]) for line in reversed(above) if (found := _PLACE.match(line))]
    return told[-1].strip() + (last_own(places) if is_placed else "")


def flower_environment(home: Path) -> dict[str, str]:
    """Variables for a Flower process, private and offline, with its own FLWR_HOME.

    Flower takes these settings from nowhere else. Variables of the user's that would change its
    behaviour behind our back (`FLWR_…`) are dropped. A Python finds the package that runs now.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, env.get("PYTHONPATH")))),
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


@contextmanager
def only_one(folder: Path, key: str, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a folder, which setting `key` names; the kernel lets go when this process ends.

    One that is in use is waited for up to `patience_s`.
    """
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            if patience_s:
                told = "%s %s is in use by another service; waiting up to %.0f s for its end"
                _log.warning(told, key, folder, patience_s)
            lock.acquire(timeout=patience_s)
    except Timeout:
        raise ConfigError(
            f"{key} {folder} is in use by another service; stop that one or set another {key}"
        ) from None
    except OSError as error:
        raise disk_full(error, folder) or ConfigError(
            f"{key} {folder} cannot be written: {error.strerror}; give a folder of this user's"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def log_to(path: Path, *, echo: bool) -> Iterator[None]:
    """Append what fedwan logs to a file while the block runs; echoed to stderr for systemd.

    A file that is renamed meanwhile, as logrotate does, is begun anew.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [WatchedFileHandler(path, encoding="utf-8")]
    handlers += [logging.StreamHandler(sys.stderr)] if echo else []
    logger = logging.getLogger("fedwan")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        # On a full disk it would print a traceback for each line.
        handler.handleError = lambda record: None  # type: ignore[method-assign]
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            with suppress(OSError):  # a full disk again
                handler.close()


@contextmanager
def serving(
    folder: Path, key: str, log: str, *, echo: bool = False, patience_s: float = 0.0
) -> Iterator[None]:
    """Around a service's work: its folder is its own, as `only_one` has it, and it logs there.

    What it and its children make, no other user of the machine can read. A `DiskFull` if the folder
    has no room, or has none left when something has failed that does not say why.
    """
    mask = os.umask(0o077)
    _raise_descriptors()
    try:
        with (
            on_disk(folder),
            only_one(folder, key, patience_s),
            log_to(folder / "logs" / log, echo=echo),
        ):
            if full := no_room(folder):
                raise full
            yield
    except FedwanError as error:
        if type(error) in (FedwanError, ProcessLost) and (full := no_room(folder)):
            raise full from error
        raise
    finally:
        os.umask(mask)


def _raise_descriptors() -> None:
    """Let this process and its children have all the files and sockets that the system grants.

    Else whoever opens a thousand connections leaves none for a checkpoint.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS grants less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Backoff:
    """How long to wait before what failed is tried again.

    The first failure is mended at once, the next after 1, 2, 4 … seconds, up to `longest_s`; what
    lasted a minute did not die of what killed it last time, and counts anew.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._failures = 0

    def wait_s(self, lasted_s: float) -> float:
        """After another failure, of what had lasted so long."""
        self._failures = 0 if lasted_s > _LASTED_S else self._failures + 1
        return 0.0 if self._failures < 2 else min(self._longest_s, 2.0 ** (self._failures - 2))


@contextmanager
def stop_on_sigterm(stop: threading.Event) -> Iterator[None]:
    """Set an event on SIGTERM while the block runs; in the main thread alone, which has signals.

    On SIGHUP, too, of a terminal that is closed, unless `nohup` has it ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        # Not here: the main thread may be inside `stop.wait`, and `set` would wait for its lock.
        threading.Thread(target=stop.set, name="sigterm").start()

    is_deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = (signal.SIGTERM,) if is_deaf else (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen(address: str, key: str) -> socket.socket:
    """A TCP socket at the `host:port` of setting `key`; port 0 is any, `[::]` IPv4 as well."""
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_both = host == "::" and socket.has_dualstack_ipv6()
    try:
        # Bound alone it would not refuse a second one; listening, it does.
        return socket.create_server(
            (host, port), family=family, backlog=128, dualstack_ipv6=is_both
        )
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is in use; stop what holds it or set another",
            errno.EACCES: "ports below 1024 need a privilege; set a higher one",
        }.get(error.errno or 0, f"{error.strerror}; give an address of this machine, or 0.0.0.0")
        raise ConfigError(f"{key} = {address} cannot be listened on: {reason}") from error
