"""SuperLink, Flower's server: one per run, on loopback, started and watched by the coordinator.

It listens in the clear on 127.0.0.1 because its Control API has no authentication and shares the
Fleet API's port; sites reach it through the front door. Its state is a file, so that a
coordinator that comes back finds the SuperNodes it knew and does not disturb those still at work.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from fedwan.errors import FedwanError
from fedwan.flower.environment import flower_environment
from fedwan.flower.ports import free_port
from fedwan.flower.processes import Service, find_tool, last_line

__all__ = ["SuperLink"]

_START_S = 60.0
_HOST = "127.0.0.1"
_DATABASE = "superlink.db"


class SuperLink:
    """A SuperLink process that is being started.

    Args:
        folder: its FLWR_HOME and database; made where missing.
        log: file for its output.
        keep: keep the database of the last time, and with it the SuperNodes it knew.
    """

    def __init__(self, folder: Path, log: Path, *, keep: bool) -> None:
        self._folder = folder
        self._log = log
        folder.mkdir(parents=True, exist_ok=True)
        for old in [] if keep else folder.glob(f"{_DATABASE}*"):
            old.unlink()
        self._start()

    @property
    def address(self) -> str:
        """`host:port` of its HTTP port."""
        return f"{_HOST}:{self._port}"

    def _start(self) -> None:
        self._port = free_port(_HOST)
        argv = [
            find_tool("flower-superlink"),
            "--insecure",
            "--host",
            _HOST,
            "--port",
            str(self._port),
            "--database",
            str((self._folder / _DATABASE).absolute()),
            "--disable-runtime-dependency-installation",
        ]
        self.service = Service("SuperLink", argv, self._log, flower_environment(self._folder))

    def wait_until_ready(self) -> None:
        """Block until it answers.

        Raises:
            FedwanError: it ended, or did not answer within a minute.
        """
        deadline = time.monotonic() + _START_S
        attempts = 3
        while not _answers(_HOST, self._port):
            if self.service.poll() is not None:
                # Another program took the port between our look and its start.
                if attempts and "address already in use" in last_line(self._log).lower():
                    attempts -= 1
                    self.service.stop(grace_s=0.0)
                    self._start()
                    continue
                raise self.service.death()
            if time.monotonic() > deadline:
                raise FedwanError(
                    f"SuperLink did not answer on {self.address} within {_START_S:.0f} s; "
                    f"look into {self._log}"
                )
            time.sleep(0.05)
        # Its SuperExec has opened a session of its own by now: remember it.
        self.service.processes()


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
