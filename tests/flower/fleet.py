"""Services in processes of their own, and what can be seen of them from outside."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.planes import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).parent / "standin" / "train.py"
as_nobody = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# It imports first: the interpreter may lie where nobody may read.
_PRELUDE = """
import encodings.idna, os, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""
CALL = """
for port in map(int, sys.argv[1:]):
    with socket.socket() as caller:
        caller.settimeout(10)
        caller.connect(("127.0.0.1", port))
        try:
            caller.sendall(b"POST /v1/control/list-runs HTTP/1.1\\r\\nhost: x\\r\\n"
                b"content-type: application/x-protobuf\\r\\ncontent-length: 0\\r\\n\\r\\n")
            print(port, len(caller.recv(1000)))
        except ConnectionError:
            print(port, 0)
"""

OPEN = """
for path in sys.argv[1:]:
    for way in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, way))
            print(path)
        except OSError:
            pass
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            os.chdir(os.path.dirname(path))
            caller.connect(os.path.basename(path))
            print(path)
        except OSError:
            pass
"""
"""Prints which files can be read or written, and which sockets take a connection."""


class Fleet:
    """Processes whose children are found whatever sessions and parents they move to."""

    def __init__(self) -> None:
        self._mark = f"FLEET={uuid.uuid4()}"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start Python with these words."""
        key, _, value = self._mark.partition("=")
        process = subprocess.Popen(
            [sys.executable, *words],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), key: value},
        )
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """All live processes."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue  # gone meanwhile, or somebody else's
        return found

    def pid_with(self, word: str) -> int:
        """The process that has a word in its command line."""
        return next(
            pid for pid in self.pids() if any(Path(p).name == word for p in command_of(pid)[:6])
        )

    def kill(self) -> None:
        """End all that is left."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.communicate()


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def joins(out: Path) -> list[dict[str, Any]]:
    """What the sites' scripts wrote down when they joined."""
    path = out / "joined.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports on which a process listens."""
    try:
        found = psutil.Process(pid).net_connections("inet")
    except psutil.Error:  # gone meanwhile
        return []
    return [(row.laddr.ip, row.laddr.port) for row in found if row.status == psutil.CONN_LISTEN]


def wait_for(what: Callable[[], object], patience_s: float = 90) -> None:
    eventually(what, within_s=patience_s)


def free_port() -> int:
    """A port of loopback on which nothing listens now.

    Below the range that the kernel takes for outgoing connections, so that nobody is given it
    between our look and a service's start.
    """
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    pytest.fail("no free port on 127.0.0.1")


def nobody(code: str, *given: int | Path) -> str:
    """What another user's Python prints."""
    words = [sys.executable, "-I", "-c", _PRELUDE + code, *map(str, given)]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
