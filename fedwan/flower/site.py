"""A site's service: the forwarder, a SuperNode, and their care, from one run to the next.

`fedwan site SITE.yaml`, or `python -m fedwan.flower.site`. It starts another SuperNode where one
has died, and where Flower would not notice for a minute, or ever, that the coordinator must send a
new ticket: a ClientApp that was killed, an answer that was lost on the way. A SuperNode that says
goodbye is noticed at once, and its successor is sent a ticket within seconds.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fedwan.errors import FedwanError, IdentityError
from fedwan.flower.forwarder import Forwarder
from fedwan.flower.lock import only_one
from fedwan.flower.logs import clientapp_log, log_to, stop_on_sigterm
from fedwan.flower.marks import Mark, clientapp_mark, end_orphan, read_mark
from fedwan.flower.processes import Service, last_line
from fedwan.flower.site_file import SiteFile
from fedwan.flower.supernode import start_supernode
from fedwan.link.tls import Identity

__all__ = ["main", "serve_site"]

_TICK_S = 0.5
_GRACE_S = 4.0
# A SuperNode that served this long did not die of what killed it last time.
_LASTED_S = 60.0
_LONGEST_WAIT_S = 30.0

_log = logging.getLogger(__name__)


def serve_site(site: SiteFile, *, stop: threading.Event | None = None) -> None:
    """Keep a site at the coordinator's disposal until told to stop, run after run.

    Args:
        site: who, where, and what may run there.
        stop: ends the service when set; SIGTERM does too, if called from the main thread.

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
        end_orphan(clientapp_mark(folder))
        forwarder = Forwarder(Path(site.identity), site.door)
        forwarder.start()
        warden = _Warden(site, forwarder)
        try:
            _log.info("site %s serves front door %s", site.site, site.door)
            while not stop.wait(_TICK_S):
                warden.look()
        finally:
            warden.close()
            forwarder.stop()


class _Warden:
    """Watches over a SuperNode and its ClientApp."""

    def __init__(self, site: SiteFile, forwarder: Forwarder) -> None:
        self._site = site
        self._forwarder = forwarder
        self._mark_path = clientapp_mark(Path(site.dir))
        self._mark_path.unlink(missing_ok=True)
        self._deaths = 0
        self._node: Service | None = None
        self._due_at = 0.0
        self._refused_at: float | None = None

    def look(self) -> None:
        """See to whatever needs it now; raises what only the user can mend."""
        if self._forwarder.refusal is not None:
            raise self._forwarder.refusal
        mark = read_mark(self._mark_path)
        if self._node is None:
            if time.monotonic() >= self._due_at:
                self._start()
        elif (reason := self._why_restart(self._node, mark)) is not None:
            self._restart(self._node, reason)
        elif mark is not None and mark.outcome == "refused" and mark.gone:
            self._give_up(mark)

    def close(self) -> None:
        """End the SuperNode and all below it."""
        if self._node is not None:
            self._node.stop(_GRACE_S)

    def _start(self) -> None:
        self._node = start_supernode(self._site, self._forwarder.address)

    def _why_restart(self, node: Service, mark: Mark | None) -> str | None:
        if node.poll() is not None:
            return f"the SuperNode ended ({last_line(node.log)})"
        if mark is not None and mark.silent:
            return f"the ClientApp (process {mark.pid}) was killed"
        # While a ClientApp is at work its SuperNode asks for no ticket, so none can be lost.
        if (mark is None or mark.gone) and self._forwarder.take_lost():
            return "an answer of the coordinator's was lost"
        return None

    def _restart(self, node: Service, reason: str) -> None:
        lasted = time.monotonic() - node.started_at
        self._deaths = 1 if lasted > _LASTED_S else self._deaths + 1
        # The first is mended at once, the next after 1, 2, 4 … seconds.
        wait = 0.0 if self._deaths < 2 else min(_LONGEST_WAIT_S, 2.0 ** (self._deaths - 2))
        _log.warning("%s; a new SuperNode in %.0f s", reason, wait)
        node.stop(_GRACE_S)
        self._mark_path.unlink(missing_ok=True)
        self._node, self._due_at = None, time.monotonic() + wait

    def _give_up(self, mark: Mark) -> None:
        # Let the SuperNode carry the refusal to the coordinator's log first.
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        if now - self._refused_at > 2.0:
            raise mark.exception(clientapp_log(Path(self._site.dir)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service from the command line; `fedwan site` is the same with a file.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m fedwan.flower.site", description=__doc__)
    parser.add_argument("settings", type=Path, help="JSON that `SiteFile.write` wrote")
    words = parser.parse_args(argv)
    try:
        serve_site(SiteFile.read(words.settings))
    except FedwanError as error:
        print(f"fedwan: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
