"""The way of Flower's calls from a site to SuperLink: forwarder, front door, mutual TLS between.

SuperLink's Control API, which starts runs, has no authentication and shares a port with the Fleet
API that SuperNodes call. So SuperLink listens on loopback, and the front door, which asks everyone
for a site's certificate, passes Fleet calls alone. A SuperNode can show no certificate: it dials
the site's forwarder on loopback, which does, and checks that the door is the coordinator's.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn
from cryptography import x509
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedwan._config_checks import check_address
from fedwan.errors import FedwanError, IdentityError
from fedwan.flower.service import listen
from fedwan.link.tls import Identity, certificate_name, now

__all__ = ["MAX_BODY", "Forwarder", "FrontDoor"]

MAX_BODY = 16 << 20
"""Longest body of a call, in bytes; one carries a ticket or its answer, a few kilobytes."""

_CALL = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
_HEARTBEAT = "/v1/fleet/send-node-heartbeat"
_REFUSED = "fedwan-refused"
# Less than the 30 s after which a SuperNode gives a call up.
_PATIENCE_S = 15.0
_REPEAT_S = 600.0
# A SuperNode asks every 3 s; its connection should live from one question to the next.
_KEEP_ALIVE_S = 75
# Connection-level headers, and those that httpx or starlette write themselves.
_DROPPED = frozenset(
    "accept-encoding connection content-encoding content-length expect host keep-alive "
    "proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)

_log = logging.getLogger(__name__)


class Trouble(NamedTuple):
    """A call that did not come through, or not at the first attempt."""

    path: str
    is_sent: bool
    """Whether the other side may have acted on it: its answer is lost then."""
    error: Exception | None
    """None where the other side reports a loss beyond it."""


class _Protocol(H11Protocol):
    """HTTP/1.1 that tells the app, under `state["peer"]`, the other end's certificate."""

    def __init__(self, *args: Any, stopping: threading.Event, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stopping = stopping

    def connection_made(self, transport: Any) -> None:
        tls = transport.get_extra_info("ssl_object")
        if der := tls and tls.getpeercert(binary_form=True):
            self.app_state = {**self.app_state, "peer": der}
        super().connection_made(transport)
        # Uvicorn closes the connections it has when it stops, not one whose handshake ends later.
        if self._stopping.is_set():
            self.shutdown()


class _Relay:
    """A thread that passes Fleet calls on and refuses everything else.

    A call that never left us is answered 503, and one whose answer was lost 502: the first may be
    repeated by anyone, the second only by who knows that doing it twice is harmless. SuperLink's
    own 500, as of a full disk or a locked database, undid the call: it is answered 503 as well,
    since Flower gives up at 500.

    It listens with TLS `serves` and dials `target`, `http(s)://host:port`, with `dials`, for
    `patience_s` seconds while calls cannot leave us; `on_trouble` is told of each failed attempt.
    `check` names a request's sender for the log, and why it may not call at all.
    """

    def __init__(
        self,
        name: str,
        bound: socket.socket,
        target: str,
        on_trouble: Callable[[Trouble], None],
        *,
        serves: ssl.SSLContext | None = None,
        dials: ssl.SSLContext | None = None,
        patience_s: float = 0.0,
        check: Callable[[Request], tuple[str, str]] = lambda request: ("local", ""),
    ) -> None:
        self._bound = bound
        self._target = target
        self._on_trouble = on_trouble
        self._dials = dials
        self._patience_s = patience_s
        self._check = check
        self._stopping = threading.Event()
        # It would report each scanner that speaks no HTTP, and each call cut short by our end.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._handle,
                http=partial(_Protocol, stopping=self._stopping),  # type: ignore[arg-type]
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                ssl_context_factory=None if serves is None else (lambda config, default: serves),
            )
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start serving; returns once connections are answered.

        Raises:
            FedwanError: the server could not start.
        """
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise FedwanError(f"the {self._thread.name} could not start; see the log")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop serving and close the socket; answers under way get a second."""
        self._stopping.set()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._bound.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        # One client for all calls, so that connections are kept; the proxy settings of the user's
        # environment are not for this traffic.
        async with httpx.AsyncClient(
            verify=self._dials or False,
            trust_env=False,
            timeout=httpx.Timeout(25.0, connect=10.0),
            limits=httpx.Limits(max_connections=100, keepalive_expiry=60.0),
        ) as self._client:
            await self._server.serve(sockets=[self._bound])
        # Connections that were cut off while they were being made close in the loop's next turns.
        await asyncio.sleep(0.1)

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        response = await self._answer(request)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path: bytes = request.scope["raw_path"]
        who, reason = self._check(request)
        if reason:
            _log.warning("%s refused: %s", who, reason)
            return _reply(403, reason, {_REFUSED: "1"})
        if request.method != "POST" or request.scope["query_string"] or not _CALL.fullmatch(path):
            asked = f"{request.method} {path[:200].decode('ascii', 'replace')}"
            _log.warning("%s asked for %r; only Fleet calls pass", who, asked)
            return _reply(404, "only POST /v1/fleet/NAME passes here")
        body = await _read(request)
        if body is None:
            _log.warning("%s sent no whole body, or one of over %d bytes", who, MAX_BODY)
            return _reply(413, f"a body has at most {MAX_BODY} bytes")
        headers = _kept(request.headers) | {"accept-encoding": "identity"}
        answer = await self._pass_on(path.decode("ascii"), body, headers)
        if isinstance(answer, int):
            return _reply(answer, "the other side is away")
        return Response(answer.content, answer.status_code, _kept(answer.headers))

    async def _pass_on(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> httpx.Response | int:
        """The other side's answer, or the status to give in its stead."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                answer = await self._client.post(self._target + path, content=body, headers=headers)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._on_trouble(Trouble(path, False, error))
            except httpx.TransportError as error:
                self._on_trouble(Trouble(path, True, error))
                return 502
            else:
                if answer.status_code not in (500, 503):
                    if answer.status_code == 502:
                        self._on_trouble(Trouble(path, True, None))
                    elif _REFUSED in answer.headers:
                        self._on_trouble(Trouble(path, False, IdentityError(answer.text.strip())))
                    return answer
                self._on_trouble(Trouble(path, False, None))
            if time.monotonic() >= deadline:
                return 503
            await asyncio.sleep(0.5)


def _reply(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{text}\n", status, {"connection": "close", **(headers or {})})


def _kept(headers: Any) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in _DROPPED}


async def _read(request: Request) -> bytes | None:
    """A request's body; None if it is too long, or the sender hung up before its end."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return None
    except ClientDisconnect:
        return None
    return bytes(body)


class FrontDoor:
    """The one port of Flower's that sites reach; serves between `open` and `close`.

    `crl.pem` in the coordinator's identity folder shuts out revoked sites. Port 0 takes a free one.

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
        self._relay: _Relay | None = None

    @property
    def port(self) -> int:
        """The port that sites dial."""
        return int(self._bound.getsockname()[1])

    def open(self, superlink: str) -> None:
        """Serve SuperLink at `http://host:port`; who came before waits in the socket's queue."""
        self._relay = _Relay(
            "front door",
            self._bound,
            superlink,
            self._report,
            serves=self._tls,
            check=self._check,
        )
        self._relay.start()

    def close(self) -> None:
        """Stop listening."""
        if self._relay is not None:
            self._relay.stop()
        self._bound.close()

    def _check(self, request: Request) -> tuple[str, str]:
        """The sender, and why it may not call: asked each time, as connections live long."""
        der = request.scope["state"]["peer"]
        certificate, name = x509.load_der_x509_certificate(der), certificate_name(der)
        host = request.client.host if request.client else "an unknown address"
        reason, expires = "", certificate.not_valid_after_utc
        if self._revocations.is_revoked(certificate.serial_number):
            reason = "is revoked"
        elif expires <= now():
            reason = f"expired on {expires:%Y-%m-%d %H:%M}"
        if reason:
            reason = (
                f"the certificate of site {name} {reason}; "
                f"ask the coordinator for a new one: fedwan pki issue {name}"
            )
        return f"site {name} at {host}", reason

    def _report(self, trouble: Trouble) -> None:
        cause = repr(trouble.error) if trouble.error else "it has an error of its own, see its log"
        _log.warning("SuperLink did not answer %s: %s", trouble.path, cause)


class Forwarder:
    """A site's end of the way; serves between `start` and `stop`.

    While the door is away it holds calls back, so that the SuperNode goes on within a second of the
    door's return.

    Raises:
        ConfigError: `door` is not `host:port`.
        IdentityError: the identity is missing, expired, or not a site's.
    """

    def __init__(self, identity: Path, door: str) -> None:
        check_address("door", door)
        credentials = Identity.load(identity, role="site")
        self._door = door
        self._expires = credentials.expires
        self._said, self._said_at = "", 0.0
        self._has_lost = threading.Event()
        self.refusal: IdentityError | None = None
        """Set once the two ends do not accept each other's certificates: trying again is vain."""
        bound = listen("127.0.0.1", 0, "the forwarder", "port")
        self.address = f"127.0.0.1:{bound.getsockname()[1]}"
        """`host:port` on loopback that the SuperNode dials."""
        tls = credentials.ssl_context(server=False)
        self._relay = _Relay(
            "forwarder", bound, f"https://{door}", self._note, dials=tls, patience_s=_PATIENCE_S
        )
        self.start, self.stop = self._relay.start, self._relay.stop

    def take_lost(self) -> bool:
        """Whether an answer was lost since the last question.

        SuperLink hands out a ticket once. If the answer that carried it was lost, the SuperNode
        will never see it, and must come back as a new one to be sent another.
        """
        has_lost = self._has_lost.is_set()
        self._has_lost.clear()
        return has_lost

    def _note(self, trouble: Trouble) -> None:
        self.refusal = self._refusal(trouble.error) or self.refusal
        if trouble.is_sent and trouble.path != _HEARTBEAT:
            self._has_lost.set()
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
