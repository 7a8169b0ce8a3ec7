"""An HTTP server in a thread, on a socket that is bound already."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, Self

import uvicorn
from cryptography import x509
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedwan.errors import FedwanError
from fedwan.link.tls import certificate_name

__all__ = ["App", "HttpServer", "Peer"]

App = Callable[..., Coroutine[Any, Any, None]]
"""An ASGI 3 application."""

# A SuperNode asks every 3 s; its connection should live from one question to the next.
_KEEP_ALIVE_S = 75


class Peer(NamedTuple):
    """Who is at the other end of a mutual-TLS connection."""

    name: str
    """The common name of its certificate: the site."""
    serial: int
    """The certificate's serial number, for revocation."""
    expires: datetime
    """When the certificate stops being valid; a connection may outlive it."""

    @classmethod
    def of(cls, der: bytes) -> Self:
        """Read a certificate in DER."""
        certificate = x509.load_der_x509_certificate(der)
        return cls(
            certificate_name(der), certificate.serial_number, certificate.not_valid_after_utc
        )


class _Protocol(H11Protocol):
    """HTTP/1.1 that tells the app, under `state["peer"]`, who is at the other end."""

    def __init__(self, *args: Any, stopping: threading.Event, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stopping = stopping

    def connection_made(self, transport: Any) -> None:
        tls = transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) if tls is not None else None
        if der is not None:
            self.app_state = {**self.app_state, "peer": Peer.of(der)}
        super().connection_made(transport)
        # Uvicorn closes the connections it has when it stops, not one whose handshake ends later.
        if self._stopping.is_set():
            self.shutdown()


class HttpServer:
    """Serves an ASGI app from a thread, between `start` and `stop`.

    Args:
        name: of the thread.
        app: the ASGI application.
        bound: a listening socket; closed by `stop`.
        tls: server context, None for plain HTTP.
    """

    def __init__(
        self, name: str, app: App, bound: socket.socket, tls: ssl.SSLContext | None = None
    ) -> None:
        self._stopping = threading.Event()
        config = uvicorn.Config(
            app,
            http=partial(_Protocol, stopping=self._stopping),  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ssl_context_factory=None if tls is None else (lambda config, default: tls),
        )
        # It would report each scanner that speaks no HTTP, and each call cut short by our end.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(config)
        self._bound = bound
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._error: BaseException | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port = self._bound.getsockname()[:2]
        return str(host), int(port)

    def start(self) -> None:
        """Start serving; returns once connections are answered.

        Raises:
            FedwanError: the server could not start.
        """
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise FedwanError(f"{self._thread.name} could not start: {self._error}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop serving and close the socket; answers under way get a second."""
        self._stopping.set()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._bound.close()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._bound])
        except BaseException as error:
            self._error = error
            raise
