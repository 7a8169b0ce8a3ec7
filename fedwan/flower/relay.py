"""The way of Flower's calls from a site to SuperLink: forwarder, front door, mutual TLS between.

SuperLink's Control API, which starts runs, has no authentication and shares a port with the Fleet
API that SuperNodes call. So SuperLink listens on loopback, and the front door, which asks everyone
for a site's certificate, passes Fleet calls alone. A SuperNode can show no certificate: it dials
the site's forwarder on loopback, which does, and checks that the door is the coordinator's. Here is
what both ends do alike.

A call is `POST /v1/fleet/NAME` and nothing else. The request line is matched as it came, before any
decoding, so that `..`, `%2e`, `//` and absolute URLs are simply not such calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import httpx
import uvicorn
from cryptography import x509
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedwan.errors import IdentityError
from fedwan.link.admission import Renewable
from fedwan.link.tls import Identity, common_name
from fedwan.protocol.limits import Refusals

# What a SuperNode sends is some hundred bytes; bundle and tickets go the other way. SuperLink logs
# what it is asked for, and keeps what an answer announces: of each object what one call carries.
_MOST_BYTES = {b"/v1/fleet/push-messages": 1 << 14, b"/v1/fleet/push-object": 1 << 16}
_MOST_BYTES_ELSE = 1 << 10
_MOST_ANSWERED = 16 << 20
_BODY_S = 60.0
_HANDSHAKE_S = 10.0
# What OpenSSL says of a certificate that no authority here has signed.
_FOREIGN = (7, 18, 19, 20, 21)
_CALL = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
_REFUSED = "fedwan-refused"
REPLACED = "has taken the place of this one; end one of the two services with this certificate"
"""Ends what a SuperNode is told after which another one came with its certificate."""
_RENEW_S = 2.0
_LATE_S = 0.1
"""In which handshakes end that had begun when the relay stops."""
_AGAIN_S = 0.5
"""Between two tries of the other side."""
# A SuperNode asks every 3 s; its connection should live from one question to the next.
_KEEP_ALIVE_S = 75
# Connection-level headers, and those that httpx or starlette write themselves.
_DROPPED = frozenset(
    "accept-encoding connection content-encoding content-length expect host keep-alive "
    "proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)

_log = logging.getLogger(__name__)


class Relay(ABC):
    """One end: a thread that passes Fleet calls on and refuses everything else.

    A call that never left us is answered 503, and one whose answer was lost 502: the first may be
    repeated by anyone, the second only by who knows that doing it twice is harmless. SuperLink's
    own 500, as of a full disk or a locked database, undid the call: it is answered 503 as well,
    since Flower gives up at 500.
    """

    _protocol: type[H11Protocol]
    """Who may connect at all."""
    _patience_s = 0.0
    """For how long calls that cannot leave us are held."""

    def __init__(self, bound: socket.socket, identity: Identity, *, serves: bool) -> None:
        self._bound = bound
        self._renewable = Renewable(identity)
        self._serves, self._tls = serves, identity.ssl_context(server=serves)
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
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

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

    def tell_foreign(self, host: str, error: ssl.SSLCertVerificationError) -> None:
        """Of a peer whose certificate TLS has not accepted."""
        is_foreign = error.verify_code in _FOREIGN
        why = "certificate of another authority" if is_foreign else error.verify_message
        self._tell("", f"{host} turned away: {why}")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=partial(_Loop, self.tell_foreign)) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._clients = [self._new_client()]
        renewing = asyncio.create_task(self._renew())
        try:
            await self._server.serve(sockets=[self._bound])
        finally:
            renewing.cancel()
            for client in self._clients:
                await client.aclose()
        # Uvicorn closes the connections it has when it stops, not one whose handshake ends later.
        await asyncio.sleep(_LATE_S)
        for late in self._server.server_state.connections:
            late.transport.abort()
        await asyncio.sleep(0.01)

    def _new_client(self) -> httpx.AsyncClient:
        """One for all calls, so that connections are kept."""
        return httpx.AsyncClient(
            verify=False if self._serves else self._tls,
            trust_env=False,  # the proxy settings of the user's environment are not for this
            timeout=httpx.Timeout(25.0, connect=10.0),
            limits=httpx.Limits(max_connections=100, keepalive_expiry=60.0),
        )

    async def _renew(self) -> None:
        """Follow the identity's folder; connections that stand showed the certificate before.

        Calls under way end on the client that they began on, which stays until the next time.
        """
        shown = self._renewable.identity
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                self._renewable.renew()
                if (found := self._renewable.identity) is not shown:
                    if self._serves:  # `Admission` knows who is no longer trusted
                        found.load_into(self._tls)
                    else:
                        self._tls = found.ssl_context(server=False)
                    *olds, last = self._clients
                    self._clients = [last, self._new_client()]
                    for old in olds:
                        await old.aclose()
                    shown = found
            except Exception:  # whatever it is, the next look may do
                _log.exception("the renewed identity could not be put to use")

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        await (await self._answer(Request(scope, receive)))(scope, receive, send)

    def _tell(self, name: str, text: str) -> str:
        """Log what is said of somebody: several lines at once, and then one in ten seconds."""
        if told := self._told[name].tell(text, time.monotonic()):
            _log.warning("%s", told)
        return told

    async def _answer(self, request: Request) -> Response:
        path: bytes = request.scope["raw_path"]
        peer, name, who = peer_of(request), "", "local"
        if peer is not None:
            name = common_name(peer)
            who = f"site {name} at {host_of(request)}"
        if request.method != "POST" or request.scope["query_string"] or not _CALL.fullmatch(path):
            asked = f"{request.method} {path[:200].decode('ascii', 'replace')}"
            self._tell(name, f"{who} asked for {asked!r}; only Fleet calls pass")
            return reply(404, "only POST /v1/fleet/NAME passes here")
        status, reason = self._admit(request, path.decode("ascii"))
        if status:
            self._tell(name, f"{who} refused: {reason}")
            answer = reply(status, reason)
            if status == 403:  # for the site's owner to mend
                answer.headers[_REFUSED] = "1"
            return answer
        most = _MOST_BYTES.get(path, _MOST_BYTES_ELSE)
        body = await _read(request.stream(), most)
        if body is None:
            self._tell(name, f"{who} sent no whole body, or one of over {most} bytes")
            return reply(413, f"a body of this call has at most {most} bytes")
        headers = kept_headers(request.headers) | {"accept-encoding": "identity"}
        return await self._pass_on(path.decode("ascii"), body, headers)

    async def _pass_on(self, path: str, body: bytes, headers: dict[str, str]) -> Response:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                async with self._clients[-1].stream(
                    "POST", self._target + path, content=body, headers=headers
                ) as answer:
                    content = await _read(answer.aiter_raw(), _MOST_ANSWERED)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._trouble(path, error)
            except httpx.TransportError as error:
                self._trouble(path, error, is_lost=True)
                return reply(502, "the other side's answer was lost")
            else:
                # Flower's clients take any 2xx for an answer, and follow where a 3xx leads.
                is_odd = answer.status_code != 200 and answer.status_code < 400
                if is_odd or content is None:
                    self._trouble(path, None, is_lost=True)
                    what = answer.status_code if is_odd else "too much, or did not come to an end"
                    return reply(502, f"the other side answered {what}")
                if answer.status_code not in (500, 503):
                    if answer.status_code == 502:
                        self._trouble(path, None, is_lost=True)
                    elif _REFUSED in answer.headers:
                        self._trouble(path, IdentityError(content.decode(errors="replace").strip()))
                    return Response(content, answer.status_code, kept_headers(answer.headers))
                self._trouble(path, None)
            if time.monotonic() >= deadline:
                return reply(503, "the other side is away")
            await asyncio.sleep(_AGAIN_S)


class _Loop(asyncio.SelectorEventLoop):
    """One that soon ends handshakes that do not go on; uvicorn gives each asyncio's 60 s.

    It tells `on_foreign` of peers whose certificate is not accepted, of which asyncio is silent.
    """

    def __init__(self, on_foreign: Callable[[str, ssl.SSLCertVerificationError], object]) -> None:
        super().__init__()
        self._on_foreign = on_foreign

    def _make_ssl_transport(self, *args: Any, **kwargs: Any) -> asyncio.Transport:
        def look(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, ssl.SSLCertVerificationError):
                self._on_foreign(kwargs["extra"]["peername"][0], error)

        if kwargs.get("server_side"):
            kwargs["waiter"].add_done_callback(look)
        made: asyncio.Transport = super()._make_ssl_transport(*args, **kwargs)  # type: ignore[misc]
        return made

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        if kwargs.get("ssl"):
            kwargs["ssl_handshake_timeout"] = _HANDSHAKE_S
        return await super().create_server(*args, **kwargs)


def peer_of(request: Request) -> x509.Certificate | None:
    """The certificate that TLS has verified; None on loopback, where it asks for none."""
    found = request.scope["state"].get("peer")
    return found and x509.load_der_x509_certificate(found)


def host_of(request: Request) -> str:
    """Where a call comes from."""
    return request.client.host if request.client else "an unknown address"


def text_of(error: BaseException | None) -> str:
    """What an error says, in the system's words where it has some; nothing of none."""
    text = "" if error is None else str(error).rstrip(".") or "the connection broke"
    if isinstance(error, httpx.TimeoutException):
        text = "it does not answer"
    while error is not None:
        is_passing = isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError)
        if isinstance(error, OSError) and error.errno and not is_passing:
            has_own = isinstance(error, ssl.SSLError | socket.gaierror)
            text = str(error.strerror) if has_own else os.strerror(error.errno)
        error = error.__cause__ or error.__context__
    return text


def reply(status: int, text: str) -> Response:
    """An answer of our own, after which the connection closes."""
    return PlainTextResponse(f"{text}\n", status, {"connection": "close"})


def kept_headers(headers: Any) -> dict[str, str]:
    """Those that are passed on."""
    return {key: value for key, value in headers.items() if key.lower() not in _DROPPED}


async def _read(chunks: AsyncIterator[bytes], most: int) -> bytes | None:
    """A body; None if it is too long, or does not come to its end in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in chunks:
                body += chunk
                if len(body) > most:
                    return None
    except (ClientDisconnect, TimeoutError):
        return None
    return bytes(body)
