"""The one kind of request that passes between a site and SuperLink: a call of Flower's Fleet API.

Both ends of the way use it: the forwarder at the site and the front door at the coordinator. A
call is `POST /v1/fleet/NAME` and nothing else. The request line is matched as it came, before any
decoding, so that `..`, `%2e`, `//` and absolute URLs are simply not such calls.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx

from fedwan.errors import IdentityError

__all__ = ["MAX_BODY", "FleetProxy", "Scope", "Trouble", "reply"]

_CALL = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
_REFUSED = (b"fedwan-refused", b"1")
_UNDONE = (httpx.codes.INTERNAL_SERVER_ERROR, httpx.codes.SERVICE_UNAVAILABLE)
MAX_BODY = 16 << 20
"""Longest body of a call, in bytes; one carries a ticket or its answer, a few kilobytes."""

# Connection-level headers, and those that httpx writes itself.
_DROPPED = {
    b"accept-encoding",
    b"connection",
    b"content-length",
    b"expect",
    b"host",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_log = logging.getLogger(__name__)


class Trouble(NamedTuple):
    """A call that did not come through, or not at the first attempt."""

    path: bytes
    sent: bool
    """Whether the other side may have acted on it: its answer is lost then."""
    error: Exception | None
    """What went wrong here; None where the other side reports a loss beyond it."""


class FleetProxy:
    """An ASGI app that passes Fleet calls on and refuses everything else.

    A call that never left us is answered 503, and one whose answer was lost 502: the first may be
    repeated by anyone, the second only by who knows that doing it twice is harmless. SuperLink's
    own 500, as of a full disk or a locked database, undid the call: it is answered 503 as well,
    since Flower gives up at 500.

    Args:
        target: where to, `http://host:port` or `https://host:port`.
        tls: for `https`, the client's context; otherwise False.
        patience_s: seconds to keep trying while calls cannot leave us.
        who: a request's sender, for the log.
        admit: why a request's sender may not call at all, None if it may.
        on_trouble: told of each failed attempt.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: ssl.SSLContext | bool = False,
        patience_s: float = 0.0,
        who: Callable[[Scope], str] = lambda scope: "local",
        admit: Callable[[Scope], str | None] = lambda scope: None,
        on_trouble: Callable[[Trouble], None] = lambda trouble: None,
    ) -> None:
        self._target = target
        self._tls = tls
        self._patience_s = patience_s
        self._who = who
        self._admit = admit
        self._on_trouble = on_trouble
        self._client: httpx.AsyncClient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the server's whole life (ASGI's lifespan)."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path, who = scope["raw_path"], self._who(scope)
        if (reason := self._admit(scope)) is not None:
            _log.warning("%s refused: %s", who, reason)
            await reply(send, 403, reason, refused=True)
        elif scope["method"] != "POST" or scope["query_string"] or not _CALL.fullmatch(path):
            asked = f"{scope['method']} {path[:200].decode('ascii', 'replace')}"
            _log.warning("%s asked for %r; only Fleet calls pass", who, asked)
            await reply(send, 404, "only POST /v1/fleet/NAME passes here")
        else:
            body = await _read(receive)
            if body is None:
                _log.warning("%s sent no whole body, or one of over %d bytes", who, MAX_BODY)
                await reply(send, 413, f"a body has at most {MAX_BODY} bytes")
            else:
                await self._pass_on(path, scope["headers"], body, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        # One client for all calls, so that connections are kept; the proxy settings of the user's
        # environment are not for this traffic.
        async with httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,
            timeout=httpx.Timeout(25.0, connect=10.0),
            limits=httpx.Limits(max_connections=100, keepalive_expiry=60.0),
        ) as self._client:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        # Connections that were cut off while they were being made close in the loop's next turns.
        await asyncio.sleep(0.1)
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(
        self, path: bytes, headers: list[tuple[bytes, bytes]], body: bytes, send: Send
    ) -> None:
        kept = [(key, value) for key, value in headers if key not in _DROPPED]
        request = self._client.build_request(
            "POST",
            self._target + path.decode("ascii"),
            headers=[*kept, (b"accept-encoding", b"identity")],
            content=body,
        )
        response = await self._attempt(request, path)
        if isinstance(response, int):
            await reply(send, response, "the other side is away")
            return
        try:
            if response.status_code == httpx.codes.BAD_GATEWAY:
                self._on_trouble(Trouble(path, sent=True, error=None))
            elif _REFUSED in response.headers.raw:
                reason = (await response.aread()).decode(errors="replace").strip()
                self._on_trouble(Trouble(path, sent=False, error=IdentityError(reason)))
                await reply(send, response.status_code, reason)
                return
            await _relay(response, send)
        except httpx.TransportError as error:
            # The status line is out already; cutting the connection tells the caller.
            self._on_trouble(Trouble(path, sent=True, error=error))
            raise
        finally:
            await response.aclose()

    async def _attempt(self, request: httpx.Request, path: bytes) -> httpx.Response | int:
        """The other side's answer, or the status to give in its stead."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                response = await self._client.send(request, stream=True)
                if response.status_code not in _UNDONE:
                    return response
                await response.aclose()
                self._on_trouble(Trouble(path, sent=False, error=None))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._on_trouble(Trouble(path, sent=False, error=error))
            except httpx.TransportError as error:
                self._on_trouble(Trouble(path, sent=True, error=error))
                return 502
            if time.monotonic() >= deadline:
                return 503
            await asyncio.sleep(0.5)


async def reply(send: Send, status: int, text: str, *, refused: bool = False) -> None:
    """Answer a request ourselves, in plain text, and close the connection.

    Args:
        send: the ASGI channel.
        status: of HTTP.
        text: one line.
        refused: mark it as our own verdict on the caller, not the target's on the call.
    """
    body = f"{text}\n".encode()
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refused:
        headers.append(_REFUSED)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes | None:
    """A request's body; None if it is too long, or the sender hung up before its end."""
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        body += event.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if not event.get("more_body", False):
            return bytes(body)


async def _relay(response: httpx.Response, send: Send) -> None:
    headers = [
        (key.lower(), value)
        for key, value in response.headers.raw
        if key.lower() not in _DROPPED or key.lower() == b"content-length"
    ]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for chunk in response.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
