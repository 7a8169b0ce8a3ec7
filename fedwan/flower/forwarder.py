"""The forwarder: the site's end of the way to SuperLink.

Flower's SuperNode can show no certificate. It dials this listener on loopback, which carries its
Fleet calls to the coordinator's front door under the site's certificate, and checks that the door
is the coordinator's. While the door is away it holds calls back, so that the SuperNode goes on
within a second of the door's return.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from pathlib import Path

from fedwan.errors import IdentityError
from fedwan.flower.http import HttpServer
from fedwan.flower.ports import listen, split_address
from fedwan.flower.proxy import FleetProxy, Trouble
from fedwan.link.certificates import now
from fedwan.link.tls import Identity

__all__ = ["Forwarder"]

# Less than the 30 s after which a SuperNode gives a call up.
_PATIENCE_S = 15.0
_REPEAT_S = 600.0
_HEARTBEAT = b"/v1/fleet/send-node-heartbeat"

_log = logging.getLogger(__name__)


class Forwarder:
    """Serves between `start` and `stop`.

    Args:
        identity: the site's identity folder.
        door: `host:port` of the front door; the host must be one that its certificate names.

    Raises:
        ConfigError: `door` is not `host:port`.
        IdentityError: the identity is missing, expired, or not a site's.
    """

    def __init__(self, identity: Path, door: str) -> None:
        host, port = split_address(door, "door")
        credentials = Identity.load(identity, role="site")
        self._door = door
        self._expires = credentials.expires
        self._said, self._said_at = "", 0.0
        self._lost = threading.Event()
        self.refusal: IdentityError | None = None
        """Set once the two ends do not accept each other's certificates: trying again is vain."""
        proxy = FleetProxy(
            f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            tls=credentials.ssl_context(server=False),
            patience_s=_PATIENCE_S,
            on_trouble=self._note,
        )
        bound = listen("127.0.0.1", 0, "the forwarder", "port")
        self._server = HttpServer("forwarder", proxy, bound)

    @property
    def address(self) -> str:
        """`host:port` on loopback that the SuperNode dials."""
        host, port = self._server.address
        return f"{host}:{port}"

    def start(self) -> None:
        """Start serving."""
        self._server.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    def take_lost(self) -> bool:
        """Whether an answer was lost since the last question.

        SuperLink hands out a ticket once. If the answer that carried it was lost, the SuperNode
        will never see it, and must come back as a new one to be sent another.
        """
        lost = self._lost.is_set()
        self._lost.clear()
        return lost

    def _note(self, trouble: Trouble) -> None:
        self.refusal = self._refusal(trouble.error) or self.refusal
        if trouble.sent and trouble.path != _HEARTBEAT:
            self._lost.set()
        cause = "it cannot reach SuperLink"
        if trouble.error is not None:
            cause = str(trouble.error) or type(trouble.error).__name__
        now_s = time.monotonic()
        if cause != self._said or now_s > self._said_at + _REPEAT_S:
            _log.warning("front door %s is away: %s; trying on", self._door, cause)
            self._said, self._said_at = cause, now_s

    def _refusal(self, error: BaseException | None) -> IdentityError | None:
        """The certificate problem behind an error, if that is what it is."""
        if self._expires <= now():
            return IdentityError(
                f"this site's certificate expired on {self._expires:%Y-%m-%d %H:%M} UTC; "
                "issue a new one: fedwan pki issue SITE"
            )
        while error is not None:
            if isinstance(error, IdentityError):
                return error
            if isinstance(error, ssl.SSLCertVerificationError):
                return IdentityError(
                    f"front door {self._door} did not prove to be this run's coordinator "
                    f"({error.verify_message}); check `door`, and that ca.crt is the coordinator's"
                )
            error = error.__cause__ or error.__context__
        return None
