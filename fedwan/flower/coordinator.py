"""The coordinator's service: SuperLink on loopback, the front door, and one run, watched.

`fedwan coordinator CONFIG.yaml` is `serve_coordinator`; `fedwan.flower.local` puts sites beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fedwan.app import installed_app
from fedwan.config import Config, host_and_port, to_json
from fedwan.errors import ConfigError, FedwanError, RunStopped
from fedwan.flower.door import FrontDoor
from fedwan.flower.errand import Errand
from fedwan.flower.lock import only_one
from fedwan.flower.logs import log_to, serverapp_log, stop_on_sigterm
from fedwan.flower.marks import end_orphan, read_mark, serverapp_mark
from fedwan.flower.ports import listen
from fedwan.flower.superlink import SuperLink

__all__ = ["Coordinator", "Started", "serve_coordinator"]

_TICK_S = 0.5
_GRACE_S = 6.0


@dataclass(frozen=True)
class Started:
    """Where a run that has just been submitted can be found."""

    run_id: str
    door_port: int
    """Port of the front door, which sites dial."""
    superlink: str
    """`host:port` of SuperLink on loopback."""
    logs: Path
    """Folder of this machine's log files."""


class Coordinator:
    """One run's services, from enter to exit.

    Args:
        config: the resolved configuration; `config.out` is the run's folder.
        door: the front door; opened by `run` and closed at exit.
        identity: the coordinator's identity folder.
        resume: go on with the run in `config.out`.

    Raises:
        CheckpointError: there is no run to resume.
    """

    def __init__(self, config: Config, door: FrontDoor, identity: Path, *, resume: bool) -> None:
        self._config = config
        self._out = Path(config.out)
        self._door = door
        self._errand = Errand.begin(self._out, identity, resume=resume)
        self._mark_path = serverapp_mark(self._out)
        self._mark_path.unlink(missing_ok=True)
        self._superlink = SuperLink(
            self._out / "flower", self._out / "logs" / "superlink.log", keep=resume
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._door.close()
        self._superlink.service.stop(_GRACE_S)

    def run(
        self,
        on_started: Callable[[Started], None] | None,
        stop: threading.Event,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Submit the run and wait for its end.

        Args:
            on_started: called once it has been submitted.
            stop: ends the wait when set.
            check: called twice a second; ends the wait by raising.

        Raises:
            ConfigError: the app makes no bundle.
            RunStopped: `stop` was set.
            FedwanError: the run did not start, or failed.
        """
        started = self._submit()
        if on_started is not None:
            on_started(started)
        while not self._is_over():
            check()
            if stop.wait(_TICK_S):
                raise RunStopped(f"the run was stopped from outside; {self._how_to_go_on()}")

    def _how_to_go_on(self) -> str:
        if (self._out / "config.yaml").exists():
            return "--resume goes on with it"
        return "it had not begun yet: start it again"

    def _submit(self) -> Started:
        """Wait for SuperLink, open the door, and submit the run."""
        # Imported while SuperLink starts: Flower's client takes half a second.
        from fedwan.flower.control import Control
        from fedwan.flower.fab import build_fab

        fab = build_fab(installed_app())
        self._superlink.wait_until_ready()
        self._door.open(f"http://{self._superlink.address}")
        self._control = Control(self._superlink.address)
        self._flower_run = self._control.start_run(fab, {"config": to_json(self._config)})
        return Started(
            self._errand.run_id, self._door.port, self._superlink.address, self._out / "logs"
        )

    def _is_over(self) -> bool:
        """Whether the run has ended well; raises if it has ended otherwise."""
        if self._superlink.service.poll() is not None:
            raise self._superlink.service.death()
        mark = read_mark(self._mark_path)
        if mark is None:
            self._check_start()
        elif mark.outcome == "done":
            return True
        elif mark.silent:
            raise FedwanError(
                f"the coordinator's ServerApp (process {mark.pid}) was killed; "
                f"go on from the last checkpoint with --resume"
            )
        elif mark.outcome != "running":
            raise mark.exception(serverapp_log(self._out))
        return False

    def _check_start(self) -> None:
        """See whether the ServerApp failed before it could leave a mark."""
        state = self._control.state(self._flower_run)
        if state.finished and read_mark(self._mark_path) is None:
            reason = " ".join(state.details.split()) or state.outcome
            raise FedwanError(f"the ServerApp failed before it began: {reason}")


def serve_coordinator(
    config: Config,
    identity: Path,
    *,
    resume: bool = False,
    on_started: Callable[[Started], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Run one run's coordinator until the run is over.

    Args:
        config: the resolved configuration; `config.out` is the run's folder.
        identity: the coordinator's identity folder, made by `fedwan pki init`.
        resume: go on with the run in `config.out`.
        on_started: called once the run has been submitted.
        stop: ends the run when set; SIGTERM does too, if called from the main thread.

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
        end_orphan(serverapp_mark(out))
        # The ServerApp will listen there, seconds from now: say at once if it cannot.
        listen(*host_and_port(link.listen), "the data plane", "link.listen").close()
        with (
            log_to(out / "logs" / "coordinator.log", echo=False),
            closing(FrontDoor(identity, *host_and_port(link.door))) as door,
            Coordinator(config, door, identity, resume=resume) as coordinator,
        ):
            coordinator.run(on_started, stop)
