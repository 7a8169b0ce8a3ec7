"""The front door: the one port of Flower's that sites reach, mutual TLS in front of SuperLink.

SuperLink's Control API, which starts runs, has no authentication and shares a port with the Fleet
API that SuperNodes call. So SuperLink listens on loopback, and this door, which asks everyone for
a site's certificate, passes Fleet calls alone.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from fedwan.flower.http import HttpServer, Peer
from fedwan.flower.ports import listen
from fedwan.flower.proxy import FleetProxy, Scope, Trouble
from fedwan.link.certificates import now
from fedwan.link.tls import Identity

__all__ = ["FrontDoor"]

_log = logging.getLogger(__name__)


class FrontDoor:
    """Listens from the start, and serves between `open` and `close`.

    Args:
        identity: the coordinator's identity folder; its `crl.pem` shuts out revoked sites.
        host: address of this machine to listen on.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is in use.
        IdentityError: the identity is missing, expired, or not a coordinator's.
    """

    def __init__(self, identity: Path, host: str, port: int) -> None:
        credentials = Identity.load(identity, role="coordinator")
        self._tls = credentials.ssl_context(server=True)
        # Who is revoked is told so in words, below: asyncio ends a failed handshake without the
        # alert, and the site could not tell that from a broken line.
        self._tls.verify_flags &= ~ssl.VERIFY_CRL_CHECK_LEAF
        self._revocations = credentials.revocations()
        self._bound = listen(host, port, "the front door", "link.door")
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port that sites dial."""
        return int(self._bound.getsockname()[1])

    def open(self, superlink: str) -> None:
        """Serve; those who came before now have been waiting in the socket's queue.

        Args:
            superlink: SuperLink's `http://host:port` on loopback.
        """
        proxy = FleetProxy(superlink, who=_site, admit=self._why_not, on_trouble=self._report)
        self._server = HttpServer("front door", proxy, self._bound, self._tls)
        self._server.start()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.stop()
        self._bound.close()

    def _why_not(self, scope: Scope) -> str | None:
        # Asked at every call: a connection may outlive the certificate that opened it.
        peer: Peer = scope["state"]["peer"]
        if self._revocations.is_revoked(peer.serial):
            return (
                f"the certificate of site {peer.name} is revoked; "
                f"ask the coordinator for a new one: fedwan pki issue {peer.name}"
            )
        if peer.expires <= now():
            return (
                f"the certificate of site {peer.name} expired on {peer.expires:%Y-%m-%d %H:%M}; "
                f"ask the coordinator for a new one: fedwan pki issue {peer.name}"
            )
        return None

    def _report(self, trouble: Trouble) -> None:
        cause = repr(trouble.error) if trouble.error else "it has an error of its own, see its log"
        _log.warning("SuperLink did not answer %s: %s", trouble.path.decode(), cause)


def _site(scope: Scope) -> str:
    peer: Peer = scope["state"]["peer"]
    return f"site {peer.name} at {scope['client'][0]}"
