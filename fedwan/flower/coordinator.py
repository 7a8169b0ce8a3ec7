"""The coordinator's service: SuperLink on loopback, the front door, and one run, watched.

`fedwan coordinator CONFIG.yaml` is `serve_coordinator`; `fedwan.flower.local` puts sites beside it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Self

from fedwan.app import installed_app
from fedwan.config import Config, host_and_port, to_json
from fedwan.errors import ConfigError, FedwanError, RunStopped
from fedwan.flower.processes import Service, find_tool, flower_environment
from fedwan.flower.relay import FrontDoor
from fedwan.flower.service import free_port, listen, log_to, only_one, stop_on_sigterm
from fedwan.flower.status import Start, Status, serverapp_log, serverapp_status

__all__ = ["Coordinator", "serve_coordinator"]

_TICK_S = 0.5
_START_S = 60.0
_GRACE_S = 6.0
_DATABASE = "superlink.db"

_log = logging.getLogger(__name__)


class Coordinator:
    """One run's services, from enter to exit.

    SuperLink, Flower's server, listens in the clear on 127.0.0.1 because its Control API has no
    authentication and shares the Fleet API's port. Its state is a file, so that a coordinator that
    comes back finds the SuperNodes it knew and does not disturb those still at work.

    Raises:
        CheckpointError: there is no run to resume.
    """

    def __init__(self, config: Config, door: FrontDoor, identity: Path, *, resume: bool) -> None:
        self._config = config
        self._out = Path(config.out)
        self._door = door
        self._run_id = Start.begin(self._out, identity, resume=resume).run_id
        self._status_path = serverapp_status(self._out)
        self._status_path.unlink(missing_ok=True)
        folder = self._out / "flower"
        for old in [] if resume else folder.glob(f"{_DATABASE}*"):
            old.unlink()
        self._port = free_port()
        argv = [find_tool("flower-superlink"), "--insecure", "--host", "127.0.0.1"]
        argv += ["--port", str(self._port), "--disable-runtime-dependency-installation"]
        argv += ["--database", str((folder / _DATABASE).absolute())]
        log = self._out / "logs" / "superlink.log"
        self._superlink = Service("SuperLink", argv, log, flower_environment(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._door.close()
        self._superlink.stop(_GRACE_S)

    def run(self, stop: threading.Event, check: Callable[[], None] = lambda: None) -> None:
        """Submit the run and wait for its end.

        `check` is called twice a second; it ends the wait by raising.

        Raises:
            ConfigError: the app makes no bundle.
            RunStopped: `stop` was set.
            FedwanError: the run did not start, or failed.
        """
        self._submit()
        while not self._is_over():
            check()
            if stop.wait(_TICK_S):
                has_begun = (self._out / "config.yaml").exists()
                mend = "--resume goes on with it"
                raise RunStopped(
                    "the run was stopped from outside; "
                    + (mend if has_begun else "it had not begun yet: start it again")
                )

    def _submit(self) -> None:
        """Wait for SuperLink, open the door, and submit the run."""
        # Imported while SuperLink starts: Flower's client takes half a second.
        from fedwan.flower.control import Control, build_fab

        fab = build_fab(installed_app())
        self._wait_for_superlink()
        address = f"127.0.0.1:{self._port}"
        self._door.open(f"http://{address}")
        self._control = Control(address)
        self._flower_run = self._control.start_run(fab, {"config": to_json(self._config)})
        _log.info(
            "run %s: door at port %d, SuperLink at %s", self._run_id, self._door.port, address
        )

    def _wait_for_superlink(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
                return
            except OSError:
                time.sleep(0.05)
            if self._superlink.poll() is not None:
                raise self._superlink.death()
            if time.monotonic() > deadline:
                raise FedwanError(
                    f"SuperLink did not answer on 127.0.0.1:{self._port} within {_START_S:.0f} s; "
                    f"look into {self._superlink.log}"
                )

    def _is_over(self) -> bool:
        """Whether the run has ended well; raises if it has ended otherwise."""
        if self._superlink.poll() is not None:
            raise self._superlink.death()
        status = Status.read(self._status_path)
        if status is None:
            self._check_start()
        elif status.outcome == "done":
            return True
        elif status.is_killed:
            raise FedwanError(
                f"the coordinator's ServerApp (process {status.pid}) was killed; "
                f"go on from the last checkpoint with --resume"
            )
        elif status.outcome != "running":
            raise status.exception(serverapp_log(self._out))
        return False

    def _check_start(self) -> None:
        """See whether the ServerApp failed before it could leave a status."""
        state = self._control.state(self._flower_run)
        if state.finished and Status.read(self._status_path) is None:
            reason = " ".join(state.details.split()) or state.outcome
            raise FedwanError(f"the ServerApp failed before it began: {reason}")


def serve_coordinator(
    config: Config, identity: Path, *, resume: bool = False, stop: threading.Event | None = None
) -> None:
    """Run one run's coordinator until the run is over.

    Raises:
        ConfigError: a port is missing or in use, or another service uses `out`.
        IdentityError: the coordinator's certificate is not in order.
        RunStopped: `stop` was set.
        FedwanError: the run failed.
    """
    stop = stop or threading.Event()
    out = Path(config.out)
    link = config.link
    for key, address in (("link.listen", link.listen), ("link.door", link.door)):
        if host_and_port(address)[1] == 0:
            raise ConfigError(
                f"{key} = {address!r} has port 0; sites need to know the port: set it, and open it"
            )
    with only_one(out, "out"), stop_on_sigterm(stop):
        if status := Status.read(serverapp_status(out)):
            status.end_orphan()
        # The ServerApp will listen there, seconds from now: say at once if it cannot.
        listen(*host_and_port(link.listen), "the data plane", "link.listen").close()
        with (
            log_to(out / "logs" / "coordinator.log", echo=False),
            closing(FrontDoor(identity, *host_and_port(link.door))) as door,
            Coordinator(config, door, identity, resume=resume) as coordinator,
        ):
            coordinator.run(stop)
