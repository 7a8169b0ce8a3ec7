"""A site's service: the forwarder, a SuperNode, and their care, from one run to the next.

`fedwan site SITE.yaml` is `serve_site`. It starts another SuperNode where one has died, and where
Flower would not notice for a minute, or ever, that the coordinator must send a new ticket: a
ClientApp that was killed, an answer that was lost on the way. A SuperNode that says goodbye is
noticed at once, and its successor is sent a ticket within seconds.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path

from fedwan.errors import DiskFull, FedwanError
from fedwan.files import no_room
from fedwan.flower import private_port, processes
from fedwan.flower.forwarder import Forwarder
from fedwan.flower.private_port import HOST
from fedwan.flower.processes import Backoff, Service
from fedwan.flower.site_file import VARIABLE, SiteFile
from fedwan.flower.status import Status, clientapp_files
from fedwan.link.tls import Identity

_TICK_S = 0.5
_GRACE_S = 4.0
_LONGEST_WAIT_S = 30.0
# In which a SuperNode carries a refusal to the coordinator's log.
_REFUSAL_S = 2.0
# In which a service ends whose parent was killed, with all below it.
_ORPHAN_S = 15.0

_log = logging.getLogger(__name__)


def serve_site(site: SiteFile) -> None:
    """Keep a site at the coordinator's disposal until told to stop, run after run.

    Raises:
        UserError: a setting or a certificate is wrong, or the coordinator refused this site.
        DiskFull: there is no room in the site's folder.
    """
    stop = threading.Event()
    identity = Identity.load(Path(site.identity), name=site.site)
    with (
        processes.serving(Path(site.dir), "dir", "site.log", echo=True, patience_s=_ORPHAN_S),
        processes.stop_on_sigterm(stop),
    ):
        with (
            closing(Forwarder(site, identity)) as forwarder,
            closing(_Supervisor(site, forwarder)) as supervisor,
        ):
            forwarder.start(f"https://{site.door}")
            _log.info("site %s dials front door %s", site.site, site.door)
            while not stop.wait(_TICK_S):
                supervisor.look()
        _log.info("site %s was told to stop, and has stopped", site.site)


class _Supervisor:
    """Watches over a SuperNode and its ClientApp."""

    def __init__(self, site: SiteFile, forwarder: Forwarder) -> None:
        self._site = site
        self._forwarder = forwarder
        self._log, self._status_path = clientapp_files(Path(site.dir))
        Status.end_orphan(self._status_path)
        self._backoff = Backoff(_LONGEST_WAIT_S)
        self._listener = private_port.listen()
        self._node: Service | None = None
        self._due_at = 0.0
        self._refused_at: float | None = None
        self._told: Status | None = None

    def look(self) -> None:
        """See to whatever needs it now; raises what ends this service."""
        if self._forwarder.refusal is not None:
            raise self._forwarder.refusal
        status = Status.read(self._status_path)
        if status is not None and status != self._told:
            self._told = status
            self._tell(status)
        now = time.monotonic()
        if self._node is None:
            if now >= self._due_at:
                self._node = self._start()
        elif (reason := self._why_restart(self._node, status)) is not None:
            self._restart(self._node, *reason)
        elif (error := self._final(status)) is not None:
            self._refused_at = self._refused_at or now
            if now - self._refused_at > _REFUSAL_S:
                raise error
        else:
            self._refused_at = None

    def _final(self, status: Status | None) -> FedwanError | None:
        """What somebody has to mend before another ticket is of use."""
        if status is None:  # there may have been no room for one
            return no_room(Path(self._site.dir))
        is_full = status.error == DiskFull.__name__
        if status.is_gone and (status.outcome == "refused" or status.is_out or is_full):
            return status.exception(self._log)
        return None

    def _tell(self, status: Status) -> None:
        """Log what is new of the run that this site takes part in."""
        self._forwarder.is_over = status.outcome == "done"
        run = f"run {status.run}" if status.run else "a run that it has not joined"
        if status.outcome == "done":
            _log.info("%s is done", run)
        elif status.outcome == "stopped":
            _log.info("%s has stopped: %s", run, status.text)
        elif status.is_behind:
            anew = f"joining {run} anew" if status.run else "asking for another ticket"
            _log.info("the coordinator was started again; %s", anew)
        elif status.text:
            seen = "" if str(self._log) in status.text else f" (log {self._log})"
            _log.warning("%s: %s%s", run, status.text, seen)
        elif status.run:
            _log.info("joined %s", run)

    def close(self) -> None:
        """End the SuperNode and all below it."""
        if self._node is not None:
            self._node.stop(_GRACE_S)
        self._listener.close()

    def _start(self) -> Service:
        """A SuperNode, Flower's process that takes the ticket and starts the ClientApp for it."""
        folder = Path(self._site.dir)
        home, settings = folder / "flower", folder / "flower" / "site.yaml"
        # A ClientApp that was killed while it unpacked the app leaves half of it, which Flower
        # would take for the whole.
        shutil.rmtree(home / "apps", ignore_errors=True)
        self._site.write(settings)
        superlink = f"{HOST}:{self._forwarder.port}"
        argv = private_port.command(self._listener, "flower-supernode", "--superlink", superlink)
        log = folder / "logs" / "supernode.log"
        env = processes.flower_environment(home) | {VARIABLE: str(settings.absolute())}
        name = f"SuperNode of {self._site.site}"
        return Service(name, argv, log, env, inherited=[self._listener])

    def _why_restart(self, node: Service, status: Status | None) -> tuple[int, str] | None:
        """The level of what is to be logged, and the reason."""
        if code := node.poll():
            return logging.WARNING, f"the SuperNode ended with status {code} (log {node.log})"
        if status is not None and status.is_killed:
            return logging.WARNING, f"the ClientApp (process {status.pid}) was killed"
        if code == 0:
            return logging.INFO, "the SuperNode ended"  # by itself, after a run
        # While a ClientApp is at work its SuperNode asks for no ticket, so none can be lost.
        if (status is None or status.is_gone) and (lost := self._forwarder.take_lost()):
            return logging.INFO, lost
        return None

    def _restart(self, node: Service, level: int, reason: str) -> None:
        wait = self._backoff.wait_s(time.monotonic() - node.started_at)
        _log.log(level, "%s; a new SuperNode in %.0f s", reason, wait)
        node.stop(_GRACE_S)
        self._forwarder.take_lost()
        self._status_path.unlink(missing_ok=True)
        self._node, self._due_at = None, time.monotonic() + wait
