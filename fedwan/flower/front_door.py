"""The front door: sites' Fleet calls on their way to SuperLink, and nobody else's.

A SuperNode makes itself a key when it starts, registers it, and signs all its calls with it;
SuperLink takes a call for a node from the holder of that node's key alone, but any number of nodes.
The door holds each certificate to one key, that of its latest SuperNode: an older one is told to
end, but may say goodbye. How often a new one may come is bounded, since SuperLink goes on to count
those that did not say goodbye as connected, for up to an hour.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedwan.config import Config
from fedwan.flower.processes import listen
from fedwan.flower.relay import REPLACED, Relay, host_of, kept_headers, peer_of, reply, text_of
from fedwan.link.admission import Admission, Lapse, refusal
from fedwan.link.tls import Identity, common_name
from fedwan.protocol.limits import Allowance

# Of a site at once; a SuperNode has its heartbeat, its question, and two objects each way.
_MOST_CALLS = 8
# One that waits for its ticket asks three times a second; SuperLink logs what it cannot answer.
_CALLS_IN_A_ROW = 120
_ANOTHER_CALL_AFTER_S = 0.2
_HEADERS_S = 10.0
# A SuperNode's forwarder keeps few; one that says nothing costs 300 kB until it is ended.
_CONNECTIONS_PER_SITE = 16
_SILENT_CONNECTIONS = 256
_MOST_NEW_NODES = 10
_ANOTHER_NODE_AFTER_S = 30.0

KEY = "flwr-public-key"
"""Header with the key of the SuperNode that calls; SuperLink checks that it has signed."""
_SUPERLINK = "SuperLink"
_REGISTER = "/v1/fleet/register-node"
_GOODBYES = ("/v1/fleet/deactivate-node", "/v1/fleet/unregister-node")


class _Listener(socket.socket):
    """One that closes at once what comes while a number of connections are open."""

    def __init__(self, bound: socket.socket, most: int, on_full: Callable[[str], object]) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._most = most
        self._on_full = on_full
        self._open: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if len(self._open) >= self._most:
            self._open = [one for one in self._open if one.fileno() >= 0]
        if len(self._open) >= self._most:
            connection.close()
            self._on_full(f"{self._most} connections to it stand, and no more are taken")
            raise ConnectionAbortedError("too many connections are open")
        self._open.append(connection)
        return connection, address


class _Protocol(H11Protocol):
    """HTTP/1.1 that tells the app, under `state["peer"]`, the other end's certificate.

    Who begins a request must end its headers soon, however often a byte of them comes.
    """

    def connection_made(self, transport: Any) -> None:
        if tls := transport.get_extra_info("ssl_object"):
            self.app_state = {**self.app_state, "peer": tls.getpeercert(binary_form=True)}
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_HEADERS_S, self._cut_off)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()
        elif self._deadline.cancelled():
            self._deadline = self.loop.call_later(_HEADERS_S, self._cut_off)

    def _cut_off(self) -> None:
        if not self.transport.is_closing():
            door: Any = self.config.app
            door.__self__.tell_late(self.app_state.get("peer"))
            self.transport.abort()


class Nodes:
    """The present SuperNode of each site."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._allowances = defaultdict[str, Allowance](
            lambda: Allowance(_MOST_NEW_NODES, _ANOTHER_NODE_AFTER_S)
        )

    def refusal(self, site: str, path: str, key: str, host: str) -> tuple[int, str]:
        """HTTP status and reason why a site's SuperNode may not make a Fleet call now.

        0 if it may. 401, at which a SuperNode ends, if a later one has taken its place; 503, at
        which it tries again, if too many have come. A door that started anew takes the first that
        calls for the present one.
        """
        if path in _GOODBYES or key == self._keys.get(site):
            return 0, ""
        if site in self._keys and path != _REGISTER:
            later = f"a later SuperNode of site {site}, at {self._hosts[site]},"
            return 401, f"{later} {REPLACED}"
        if not self._allowances[site].spend(self._clock()):
            return 503, f"site {site} starts SuperNodes too often; try again in a minute"
        self._keys[site], self._hosts[site] = key, host
        return 0, ""


class FrontDoor(Relay):
    """The one port of Flower's that sites reach; serves between `start(superlink)` and `close`.

    `crl.pem` in the coordinator's identity folder shuts out revoked sites. Port 0 takes a free one.
    `on_refusal` is given what is told of a site, in a thread: its name, or nothing, and a line.
    """

    _protocol = _Protocol

    def __init__(
        self, identity: Path, config: Config, on_refusal: Callable[[str, str], object]
    ) -> None:
        credentials = Identity.load(identity, role="coordinator")
        # Who is revoked is told so in words, below: asyncio ends a failed handshake without the
        # alert, and the site could not tell that from a broken line.
        self._admission = Admission(identity)
        self._nodes = Nodes()
        self._calls: Counter[str] = Counter()
        self._rates = defaultdict[str, Allowance](
            lambda: Allowance(_CALLS_IN_A_ROW, _ANOTHER_CALL_AFTER_S)
        )
        bound = listen(config.link.door, "link.door")
        most = config.num_sites * _CONNECTIONS_PER_SITE + _SILENT_CONNECTIONS
        listener = _Listener(bound, most, partial(self._tell, ""))
        self._on_refusal = on_refusal
        super().__init__(listener, credentials, serves=True)

    def tell_late(self, peer: bytes | None) -> None:
        """Of who has not sent a request's headers in time."""
        name = common_name(x509.load_der_x509_certificate(peer)) if peer else ""
        self._tell(name, f"the headers of a request of {name} took over {_HEADERS_S:g} s")

    def _tell(self, name: str, text: str) -> str:
        told = super()._tell(name, text)
        if told and name != _SUPERLINK:
            asyncio.get_running_loop().run_in_executor(None, self._on_refusal, name, told)
        return told

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        certificate = peer_of(Request(scope))
        assert certificate is not None, "TLS lets nobody in without one"
        site = common_name(certificate)
        text = ""
        if self._calls[site] >= _MOST_CALLS:
            text = f"site {site} has {_MOST_CALLS} calls under way, and no more are its share"
        elif not self._rates[site].spend(time.monotonic()):
            a_second = 1 / _ANOTHER_CALL_AFTER_S
            text = f"site {site} makes more than {a_second:g} calls a second, and no more are taken"
        if text:
            self._tell(site, text)
            await reply(503, text)(scope, receive, send)
            return
        self._calls[site] += 1
        try:
            await super()._handle(scope, receive, send)
        finally:
            self._calls[site] -= 1

    def _admit(self, request: Request, path: str) -> tuple[int, str]:
        # Asked each time, as connections live long.
        certificate = peer_of(request)
        assert certificate is not None, "TLS lets nobody in without one"
        site = common_name(certificate)
        if why := self._admission.objection(certificate):
            return 503 if isinstance(why, Lapse) else 403, refusal(site, why)
        # As it will be passed on: of a header that comes twice, the last.
        key = kept_headers(request.headers).get(KEY, "")
        return self._nodes.refusal(site, path, key, host_of(request))

    def _trouble(self, path: str, error: Exception | None, *, is_lost: bool = False) -> None:
        cause = text_of(error) or "it has an error of its own, see its log"
        self._tell(_SUPERLINK, f"SuperLink did not answer {path}: {cause}")
