"""A port of loopback that only processes of this user can use.

Flower's SuperLink and SuperNode listen on 127.0.0.1 and trust whoever calls: SuperLink's Control
API runs what it is sent, and a SuperNode's Runtime API hands out its work. So does a site's
forwarder. Any user of the machine could call them, or wait for one to die and take its port.

Here the service itself listens, for as long as it lives, and hands the socket down to Flower's
process, which is this module (`run_command`): nobody else can be taken for it. And a connection is
cut unless its other end is a socket of this user's, which the kernel tells (proc_pid_net(5)).
Where that is missing (not Linux), everybody is let in.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HOST = "127.0.0.1"

_SOCKETS = Path("/proc/self/net/tcp")
_refused: set[tuple[int, int]] = set()

_log = logging.getLogger(__name__)


def listen() -> socket.socket:
    """A socket that listens at a free port, for a server with `PrivateProtocol`.

    Without SO_REUSEADDR: when all who hold it have died, what is left of their connections keeps
    the port from others for a minute, in which those who called them notice.
    """
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen(128)
    return listener


def owner_of(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """User id of who holds the socket from `local` to `remote`, IPv4 and of this machine.

    None if nobody does. A socket that was closed lives on until all of it has been read; the kernel
    may then say that it is root's, but tells by inode 0 that no process holds it.
    """
    ends = [_as_kernel_writes(*local), _as_kernel_writes(*remote)]
    for line in _SOCKETS.read_text().splitlines():
        words = line.split()
        if words[1:3] == ends and words[9] != "0":
            return int(words[7])
    return None


def _as_kernel_writes(host: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


class PrivateProtocol(H11Protocol):
    """HTTP/1.1 for this user's processes; another's connection is cut before a byte is read."""

    def connection_made(self, transport: Any) -> None:
        """A connection was accepted: cut it unless its other end is this user's."""
        super().connection_made(transport)
        if sys.platform != "linux":
            return
        here, there = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        if (owner := owner_of(there, here)) != os.geteuid():
            transport.abort()
            # One line for each, whatever they do; who has hung up already is nobody.
            if owner is not None and (owner, here[1]) not in _refused:
                _refused.add((owner, here[1]))
                words = owner, here[1], os.geteuid()
                _log.warning("user %d called port %d, which is user %d's alone", *words)


def _retrying(app: Any) -> Any:
    """An ASGI app of Flower's that answers 503 to a heartbeat that it could not note.

    As on a full disk, or while its database is locked. At a 500 whoever sends a task's heartbeats
    stops for good, and half a minute later the task is taken for dead.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_on(message: Any) -> None:
            is_heartbeat = scope.get("path", "").endswith("-heartbeat")
            if is_heartbeat and message.get("status") == 500:
                message = {**message, "status": 503}
            await send(message)

        await app(scope, receive, send_on)

    return answer


def command(listener: socket.socket, name: str, *words: str) -> list[str]:
    """Words that start Flower's command `name` on a socket, which its process has to inherit."""
    port = listener.getsockname()[1]
    start = [sys.executable, "-P", "-m", __name__, str(listener.fileno()), name]
    return [*start, "--insecure", "--host", HOST, "--port", str(port), *words]


def run_command(number: str, name: str, *words: str) -> None:
    """Become a Flower command whose server, of uvicorn, takes the socket with this number."""
    listener = socket.socket(fileno=int(number))
    serve = uvicorn.Server.serve

    async def serve_listener(
        self: uvicorn.Server, sockets: Sequence[socket.socket] | None = None
    ) -> None:
        assert sockets is None and not self.config.loaded
        self.config.http = PrivateProtocol
        self.config.app = _retrying(self.config.app)
        await serve(self, [listener])

    uvicorn.Server.serve = serve_listener  # type: ignore[method-assign]
    sys.argv = [name, *words]
    (entry,) = entry_points(group="console_scripts", name=name)
    sys.exit(entry.load()())


if __name__ == "__main__":
    run_command(*sys.argv[1:])
