"""A site's service: the forwarder, a SuperNode, and their care, from one run to the next.

`fedwan site SITE.yaml`, or `python -m fedwan.flower.site`. It starts another SuperNode where one
has died, and where Flower would not notice for a minute, or ever, that the coordinator must send a
new ticket: a ClientApp that was killed, an answer that was lost on the way. A SuperNode that says
goodbye is noticed at once, and its successor is sent a ticket within seconds.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from pathlib import Path

from fedwan.errors import ConfigError, FedwanError, IdentityError
from fedwan.flower.processes import Service, find_tool, flower_environment, last_line
from fedwan.flower.relay import Forwarder
from fedwan.flower.service import free_port, log_to, only_one, stop_on_sigterm
from fedwan.flower.site_file import SiteFile
from fedwan.flower.status import Status, clientapp_log, clientapp_status
from fedwan.link.tls import Identity

__all__ = ["main", "serve_site", "start_supernode"]

_TICK_S = 0.5
_GRACE_S = 4.0
# A SuperNode that served this long did not die of what killed it last time.
_LASTED_S = 60.0
_LONGEST_WAIT_S = 30.0
# In which a SuperNode carries a refusal to the coordinator's log.
_REFUSAL_S = 2.0

_log = logging.getLogger("fedwan.flower.site")  # it may run as `__main__`


def serve_site(site: SiteFile, *, stop: threading.Event | None = None) -> None:
    """Keep a site at the coordinator's disposal until told to stop, run after run.

    Raises:
        ConfigError: a setting is wrong, or another service uses the folder.
        IdentityError: the site's certificate, or the coordinator's, is not in order.
        UserError: the coordinator refused this site.
    """
    stop = stop or threading.Event()
    folder = Path(site.dir)
    identity = Identity.load(Path(site.identity), role="site")
    if identity.name != site.site:
        raise IdentityError(
            f"site is {site.site!r} but {site.identity} is the identity of "
            f"{identity.name!r}; give the folder that was issued to {site.site!r}"
        )
    with (
        only_one(folder, "dir"),
        log_to(folder / "logs" / "site.log", echo=True),
        stop_on_sigterm(stop),
    ):
        if status := Status.read(clientapp_status(folder)):
            status.end_orphan()
        forwarder = Forwarder(Path(site.identity), site.door)
        forwarder.start()
        supervisor = _Supervisor(site, forwarder)
        try:
            _log.info("site %s serves front door %s", site.site, site.door)
            while not stop.wait(_TICK_S):
                supervisor.look()
        finally:
            supervisor.close()
            forwarder.stop()


class _Supervisor:
    """Watches over a SuperNode and its ClientApp."""

    def __init__(self, site: SiteFile, forwarder: Forwarder) -> None:
        self._site = site
        self._forwarder = forwarder
        self._status_path = clientapp_status(Path(site.dir))
        self._status_path.unlink(missing_ok=True)
        self._deaths = 0
        self._node: Service | None = None
        self._due_at = 0.0
        self._refused_at: float | None = None

    def look(self) -> None:
        """See to whatever needs it now; raises what only the user can mend."""
        if self._forwarder.refusal is not None:
            raise self._forwarder.refusal
        status = Status.read(self._status_path)
        now = time.monotonic()
        if self._node is None:
            if now >= self._due_at:
                self._node = start_supernode(self._site, self._forwarder.address)
        elif (reason := self._why_restart(self._node, status)) is not None:
            self._restart(self._node, reason)
        elif status is not None and status.outcome == "refused" and status.is_gone:
            self._refused_at = self._refused_at or now
            if now - self._refused_at > _REFUSAL_S:
                raise status.exception(clientapp_log(Path(self._site.dir)))

    def close(self) -> None:
        """End the SuperNode and all below it."""
        if self._node is not None:
            self._node.stop(_GRACE_S)

    def _why_restart(self, node: Service, status: Status | None) -> str | None:
        if node.poll() is not None:
            return f"the SuperNode ended ({last_line(node.log)})"
        if status is not None and status.is_killed:
            return f"the ClientApp (process {status.pid}) was killed"
        # While a ClientApp is at work its SuperNode asks for no ticket, so none can be lost.
        if (status is None or status.is_gone) and self._forwarder.take_lost():
            return "an answer of the coordinator's was lost"
        return None

    def _restart(self, node: Service, reason: str) -> None:
        lasted = time.monotonic() - node.started_at
        self._deaths = 1 if lasted > _LASTED_S else self._deaths + 1
        # The first is mended at once, the next after 1, 2, 4 … seconds.
        wait = 0.0 if self._deaths < 2 else min(_LONGEST_WAIT_S, 2.0 ** (self._deaths - 2))
        _log.warning("%s; a new SuperNode in %.0f s", reason, wait)
        node.stop(_GRACE_S)
        self._status_path.unlink(missing_ok=True)
        self._node, self._due_at = None, time.monotonic() + wait


def start_supernode(site: SiteFile, superlink: str) -> Service:
    """Start a SuperNode, Flower's process that takes the ticket and starts the ClientApp for it.

    Raises:
        ConfigError: the path of the file that tells the ClientApp of the site cannot be passed on.
    """
    home = Path(site.dir) / "flower"
    # A ClientApp that was killed while it unpacked the app leaves half of it, which Flower would
    # take for the whole.
    shutil.rmtree(home / "apps", ignore_errors=True)
    settings = home / "site.json"
    site.write(settings)
    argv = [find_tool("flower-supernode"), "--insecure", "--superlink", superlink]
    argv += ["--host", "127.0.0.1", "--port", str(free_port())]
    argv += ["--node-config", f"settings={_quoted(str(settings.absolute()))}"]
    log = Path(site.dir) / "logs" / "supernode.log"
    return Service(f"SuperNode of {site.site}", argv, log, flower_environment(home))


def _quoted(path: str) -> str:
    # Flower splits at blanks outside quotes and reads each part as TOML, where ' takes all as is.
    if "'" not in path:
        return f"'{path}'"
    if '"' not in path and "\\" not in path:
        return f'"{path}"'
    raise ConfigError(f"dir is {path!r}, which Flower cannot be told; choose a path without quotes")


def main() -> int:
    """Run the service of a file that `SiteFile.write` wrote; gives the exit status."""
    try:
        serve_site(SiteFile.read(Path(sys.argv[1])))
    except FedwanError as error:
        print(f"fedwan: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
