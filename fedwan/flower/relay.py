"""The way of Flower's calls from a site to SuperLink: forwarder, front door, mutual TLS between.

SuperLink's Control API, which starts runs, has no authentication and shares a port with the Fleet
API that SuperNodes call. So SuperLink listens on loopback, and the front door, which asks everyone
for a site's certificate, passes Fleet calls alone. A SuperNode can show no certificate: it dials
the site's forwarder on loopback, which does, and checks that the door is the coordinator's. The
forwarder serves nobody but the site's own user.

A certificate is good for one SuperNode at a time (`nodes`).

A call is `POST /v1/fleet/NAME` and nothing else. The request line is matched as it came, before any
decoding, so that `..`, `%2e`, `//` and absolute URLs are simply not such calls.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography import x509
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedwan._config_tree import check_address
from fedwan.errors import ConfigError, IdentityError, UserError
from fedwan.flower import private_port
from fedwan.flower.bundle import check_bundle
from fedwan.flower.nodes import KEY, Nodes
from fedwan.flower.private_port import PrivateProtocol
from fedwan.flower.processes import listen
from fedwan.link.admission import Admission, Lapse, Renewable
from fedwan.link.tls import Identity, common_name, now
from fedwan.protocol.limits import Refusals

# A call carries the answer to a ticket, a few kilobytes; bundle and tickets go the other way.
_MAX_BODY_BYTES = 1 << 20
# Of a site at once; a SuperNode has its heartbeat, its question, and two objects each way.
_MOST_CALLS = 8
_HEADERS_S = 10.0
_BODY_S = 60.0
_CALL = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
_HEARTBEAT = "/v1/fleet/send-node-heartbeat"
_GET_FAB = "/v1/fleet/get-fab"
_PULL = "/v1/fleet/pull-messages"
_REFUSED = "fedwan-refused"
_REPEAT_S = 600.0
# As `round.patience_s`, which a site's service is not told.
_STRANGE_S = 600.0
_ASK_AGAIN_S = 0.3
_RENEW_S = 2.0
# A SuperNode asks every 3 s; its connection should live from one question to the next.
_KEEP_ALIVE_S = 75
# Connection-level headers, and those that httpx or starlette write themselves.
_DROPPED = frozenset(
    "accept-encoding connection content-encoding content-length expect host keep-alive "
    "proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)

_log = logging.getLogger(__name__)


class _Protocol(H11Protocol):
    """HTTP/1.1 that tells the app, under `state["peer"]`, the other end's certificate.

    Who begins a request must end its headers soon, however often a byte of them comes.
    """

    def connection_made(self, transport: Any) -> None:
        if tls := transport.get_extra_info("ssl_object"):
            self.app_state = {**self.app_state, "peer": tls.getpeercert(binary_form=True)}
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_HEADERS_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()
        elif self._deadline.cancelled():
            self._deadline = self.loop.call_later(_HEADERS_S, self.transport.abort)


class _Relay(ABC):
    """A thread that passes Fleet calls on and refuses everything else.

    A call that never left us is answered 503, and one whose answer was lost 502: the first may be
    repeated by anyone, the second only by who knows that doing it twice is harmless. SuperLink's
    own 500, as of a full disk or a locked database, undid the call: it is answered 503 as well,
    since Flower gives up at 500.
    """

    _protocol: type[H11Protocol]
    """Who may connect at all."""
    _patience_s = 0.0
    """For how long calls that cannot leave us are held."""
    _answered_at = 0.0
    """When the other side did so last; 0 if it never has."""

    def __init__(self, bound: socket.socket, identity: Identity, *, serves: bool) -> None:
        self._bound = bound
        self._renewable = Renewable(identity)
        self._tls = identity.ssl_context(server=serves)
        self._dials = None if serves else self._tls
        self._told: defaultdict[str, Refusals] = defaultdict(Refusals)
        # It would report each scanner that speaks no HTTP, and each call cut short by our end.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._handle,
                http=self._protocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                ssl_context_factory=(lambda config, default: self._tls) if serves else None,
            )
        )
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name=type(self).__name__, daemon=True
        )

    def _admit(self, request: Request, path: str) -> tuple[int, str]:
        """HTTP status and reason why a sender may not make a Fleet call now; 0 if it may."""
        return 0, ""

    @abstractmethod
    def _trouble(self, path: str, error: Exception | None, *, is_lost: bool = False) -> None:
        """A call failed, if only at the first attempt.

        `is_lost`: the other side may have acted on it. Without an error it has one of its own.
        """

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._bound.getsockname()[1])

    def start(self, target: str) -> None:
        """Pass calls on to `http(s)://host:port`; who came before waits in the socket's queue."""
        self._target = target
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close the socket; answers under way get a second."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._bound.close()

    async def _serve(self) -> None:
        async with AsyncExitStack() as clients:
            self._client = await clients.enter_async_context(self._new_client())
            renewing = asyncio.create_task(self._renew(clients))
            await self._server.serve(sockets=[self._bound])
            renewing.cancel()
        # Uvicorn closes the connections it has when it stops, not one whose handshake ends later.
        await asyncio.sleep(0.1)
        for late in self._server.server_state.connections:
            late.transport.abort()
        await asyncio.sleep(0.01)

    def _new_client(self) -> httpx.AsyncClient:
        """One for all calls, so that connections are kept."""
        return httpx.AsyncClient(
            verify=self._dials or False,
            trust_env=False,  # the proxy settings of the user's environment are not for this
            timeout=httpx.Timeout(25.0, connect=10.0),
            limits=httpx.Limits(max_connections=100, keepalive_expiry=60.0),
        )

    async def _renew(self, clients: AsyncExitStack) -> None:
        """Follow the identity's folder; connections that stand showed the certificate before."""
        shown = self._renewable.identity
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                self._renewable.renew()
                if (found := self._renewable.identity) is not shown:
                    found.load_into(self._tls)
                    self._client = await clients.enter_async_context(self._new_client())
                    shown = found
            except Exception:  # whatever it is, the next look may do
                _log.exception("the renewed identity could not be put to use")

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        await (await self._answer(Request(scope, receive)))(scope, receive, send)

    def _tell(self, name: str, text: str) -> None:
        """Log what is said of somebody: several lines at once, and then one in ten seconds."""
        if told := self._told[name].tell(text, time.monotonic()):
            _log.warning("%s", told)

    async def _answer(self, request: Request) -> Response:
        path: bytes = request.scope["raw_path"]
        peer, name, who = _peer_of(request), "", "local"
        if peer is not None:
            host = request.client.host if request.client else "an unknown address"
            name = common_name(peer)
            who = f"site {name} at {host}"
        if request.method != "POST" or request.scope["query_string"] or not _CALL.fullmatch(path):
            asked = f"{request.method} {path[:200].decode('ascii', 'replace')}"
            self._tell(name, f"{who} asked for {asked!r}; only Fleet calls pass")
            return _reply(404, "only POST /v1/fleet/NAME passes here")
        status, reason = self._admit(request, path.decode("ascii"))
        if status:
            self._tell(name, f"{who} refused: {reason}")
            answer = _reply(status, reason)
            if status == 403:  # for the site's owner to mend
                answer.headers[_REFUSED] = "1"
            return answer
        body = await _read(request)
        if body is None:
            self._tell(name, f"{who} sent no whole body, or one of over {_MAX_BODY_BYTES} bytes")
            return _reply(413, f"a body has at most {_MAX_BODY_BYTES} bytes")
        headers = _kept(request.headers) | {"accept-encoding": "identity"}
        return await self._pass_on(path.decode("ascii"), body, headers)

    async def _pass_on(self, path: str, body: bytes, headers: dict[str, str]) -> Response:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                answer = await self._client.post(self._target + path, content=body, headers=headers)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._trouble(path, error)
            except httpx.TransportError as error:
                self._trouble(path, error, is_lost=True)
                return _reply(502, "the other side's answer was lost")
            else:
                self._answered_at = time.monotonic()
                if answer.status_code not in (500, 503):
                    if answer.status_code == 502:
                        self._trouble(path, None, is_lost=True)
                    elif _REFUSED in answer.headers:
                        self._trouble(path, IdentityError(answer.text.strip()))
                    return Response(answer.content, answer.status_code, _kept(answer.headers))
                self._trouble(path, None)
            if time.monotonic() >= deadline:
                return _reply(503, "the other side is away")
            await asyncio.sleep(0.5)


def _peer_of(request: Request) -> x509.Certificate | None:
    """The certificate that TLS has verified; None on loopback, where it asks for none."""
    found = request.scope["state"].get("peer")
    return found and x509.load_der_x509_certificate(found)


def _text_of(error: Exception | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _reply(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, {"connection": "close"})


def _kept(headers: Any) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in _DROPPED}


async def _read(request: Request) -> bytes | None:
    """A request's body; None if it is too long, or does not come to its end in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    return None
    except (ClientDisconnect, TimeoutError):
        return None
    return bytes(body)


class FrontDoor(_Relay):
    """The one port of Flower's that sites reach; serves between `start(superlink)` and `close`.

    `crl.pem` in the coordinator's identity folder shuts out revoked sites. Port 0 takes a free one.
    """

    _protocol = _Protocol

    def __init__(self, identity: Path, host: str, port: int) -> None:
        credentials = Identity.load(identity, role="coordinator")
        # Who is revoked is told so in words, below: asyncio ends a failed handshake without the
        # alert, and the site could not tell that from a broken line.
        self._admission = Admission(identity)
        self._nodes = Nodes()
        self._calls: Counter[str] = Counter()
        bound = listen(host, port, "the front door", "link.door")
        super().__init__(bound, credentials, serves=True)

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        certificate = _peer_of(Request(scope))
        assert certificate is not None, "TLS lets nobody in without one"
        site = common_name(certificate)
        if self._calls[site] >= _MOST_CALLS:
            text = f"site {site} has {_MOST_CALLS} calls under way, and no more are its share"
            self._tell(site, text)
            await _reply(503, text)(scope, receive, send)
            return
        self._calls[site] += 1
        try:
            await super()._handle(scope, receive, send)
        finally:
            self._calls[site] -= 1

    def _admit(self, request: Request, path: str) -> tuple[int, str]:
        # Asked each time, as connections live long.
        certificate = _peer_of(request)
        assert certificate is not None, "TLS lets nobody in without one"
        site = common_name(certificate)
        if why := self._admission.objection(certificate):
            if isinstance(why, Lapse):
                return 503, f"the certificate of site {site} {why}"
            mend = "have another one signed by whoever runs the federation"
            return 403, f"the certificate of site {site} {why}; {mend}"
        # As it will be passed on: of a header that comes twice, the last.
        return self._nodes.refusal(site, path, _kept(request.headers).get(KEY, ""))

    def _trouble(self, path: str, error: Exception | None, *, is_lost: bool = False) -> None:
        cause = _text_of(error) or "it has an error of its own, see its log"
        self._tell("SuperLink", f"SuperLink did not answer {path}: {cause}")


class Forwarder(_Relay):
    """A site's end of the way, on loopback; serves between `start("https://" + door)` and `close`.

    While the door is away it holds calls back, so that the SuperNode goes on within a second of the
    door's return.
    """

    _protocol = PrivateProtocol
    # Less than the 30 s after which a SuperNode gives a call up.
    _patience_s = 15.0

    def __init__(self, identity: Path, door: str, bundles: Collection[str] = ()) -> None:
        check_address("door", door)
        self._bundles = bundles
        credentials = Identity.load(identity, role="site")
        self._door = door
        self._said, self._said_at = "", 0.0
        self._strange_since = 0.0
        """When the door began to show a certificate that is not the coordinator's."""
        self._has_lost = threading.Event()
        self.refusal: UserError | None = None
        """Set once the two ends do not accept each other's certificates, or this one not the
        other's code: trying again is vain."""
        super().__init__(private_port.listen(), credentials, serves=False)

    async def _pass_on(self, path: str, body: bytes, headers: dict[str, str]) -> Response:
        """Where there is no ticket yet, ask on for a while: a SuperNode itself asks every 3 s.

        Code that this site's owner has not approved stays here.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            answer = await super()._pass_on(path, body, headers)
            is_good = answer.status_code == 200
            if path == _GET_FAB and is_good:
                try:
                    await asyncio.to_thread(check_bundle, bytes(answer.body), self._bundles)
                except ConfigError as error:
                    self.refusal = error
                    return _reply(403, str(error))
            is_empty = path == _PULL and is_good and not answer.body
            if not is_empty or time.monotonic() > deadline:
                return answer
            await asyncio.sleep(_ASK_AGAIN_S)

    def take_lost(self) -> bool:
        """Whether an answer was lost since the last question.

        SuperLink hands out a ticket once. If the answer that carried it was lost, the SuperNode
        will never see it, and must come back as a new one to be sent another.
        """
        has_lost = self._has_lost.is_set()
        self._has_lost.clear()
        return has_lost

    def _trouble(self, path: str, error: Exception | None, *, is_lost: bool = False) -> None:
        self.refusal = self._refusal(error) or self.refusal
        if is_lost and path != _HEARTBEAT:
            self._has_lost.set()
        cause = _text_of(error) or "it cannot pass on calls now, its log says why"
        now_s = time.monotonic()
        if cause != self._said or now_s > self._said_at + _REPEAT_S:
            _log.warning("front door %s is away: %s; trying on", self._door, cause)
            self._said, self._said_at = cause, now_s

    def _refusal(self, error: BaseException | None) -> IdentityError | None:
        """The certificate problem behind an error, if that is what it is."""
        identity = self._renewable.identity
        if identity.expires <= now():
            return IdentityError(
                f"this site's certificate expired on {identity.expires:%Y-%m-%d %H:%M} UTC; "
                f"have it renewed at the authority: fedwan pki renew {identity.name}"
            )
        while error is not None:
            if isinstance(error, IdentityError):
                return error
            if isinstance(error, ssl.SSLCertVerificationError):
                if self._may_pass():
                    return None
                return IdentityError(
                    f"front door {self._door} did not prove to be this run's coordinator "
                    f"({error.verify_message}); check `door`, and that ca.crt is the coordinator's"
                )
            error = error.__cause__ or error.__context__
        self._strange_since = 0.0
        return None

    def _may_pass(self) -> bool:
        """Whether the door has answered before, and has not shown a strange certificate for long.

        Anybody on the path can show one, and DNS be wrong for a minute.
        """
        now_s = time.monotonic()
        if self._strange_since <= self._answered_at:
            self._strange_since = now_s
        return self._answered_at > 0 and now_s < self._strange_since + _STRANGE_S
