"""Ports and files of a run, seen by another user of the machine; root alone can act as one."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from fedwan.flower import private_port
from fedwan.flower.private_port import HOST, PrivateProtocol, owner_of
from fedwan.flower.processes import Service, last_line
from tests.flower.fleet import CALL, NOBODY, as_nobody, nobody
from tests.planes import eventually

LEAVE = """
with socket.socket() as caller:
    caller.connect(("127.0.0.1", int(sys.argv[1])))
    caller.sendall(b"POST / HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 0\\r\\n\\r\\n")
"""
SEIZE = """
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(sys.argv[1])))
        print("seized")
    except OSError:
        print("in use")
"""


@contextmanager
def serving(listener: socket.socket) -> Iterator[list[str]]:
    """A private server on a socket; gives the paths that it was asked for."""
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    server = uvicorn.Server(
        uvicorn.Config(app, http=PrivateProtocol, ws="none", lifespan="off", log_config=None)
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield asked
    finally:
        server.should_exit = True
        thread.join()


def get(port: int, path: str) -> bytes:
    with socket.create_connection((HOST, port), timeout=10) as caller:
        caller.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: caller.recv(1000), b""))


@as_nobody
def test_a_private_port_serves_its_own_user_alone(caplog: pytest.LogCaptureFixture) -> None:
    with closing(private_port.listen()) as listener:
        port = listener.getsockname()[1]
        # Who hangs up before it is looked at is refused, too: the kernel then says that its socket
        # is root's, as we are here.
        nobody(LEAVE, port)
        with serving(listener) as asked:
            for _ in range(2):
                assert nobody(CALL, port) == f"{port} 0\n"
            assert b"hello" in get(port, "/mine")
    assert asked == ["/mine"]
    told = [record.getMessage() for record in caplog.records if "user" in record.getMessage()]
    assert told == [f"user {NOBODY} called port {port}, which is user 0's alone"]


def test_the_kernel_tells_whose_a_socket_is() -> None:
    with (
        closing(private_port.listen()) as listener,
        socket.create_connection(listener.getsockname()) as caller,
    ):
        here, there = caller.getsockname(), caller.getpeername()
        assert owner_of(here, there) == os.geteuid()
        assert owner_of((HOST, 1), there) is None
        caller.close()
        assert owner_of(here, there) is None


SERVER = """
import sys, uvicorn
from fedwan.flower import private_port

def serve():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})
    uvicorn.run(app, host="127.0.0.1", port=1, ws="none", lifespan="off")

class Entry:
    load = staticmethod(lambda: serve)

private_port.entry_points = lambda **given: (Entry,)
private_port.run_command(*sys.argv[1:])
"""


@as_nobody
def test_nobody_can_take_the_place_of_a_server_that_starts_or_has_died(tmp_path: Path) -> None:
    listener = private_port.listen()
    port = listener.getsockname()[1]
    assert nobody(SEIZE, port) == "in use\n"
    argv = [sys.executable, "-P", "-c", SERVER, str(listener.fileno()), "it"]
    service = Service("it", argv, tmp_path / "log", inherited=[listener])
    with socket.create_connection((HOST, port), timeout=30) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in caller.recv(1000), last_line(service.log)
        os.kill(service.pid, signal.SIGKILL)
        eventually(lambda: service.poll() is not None)
        assert nobody(SEIZE, port) == "in use\n"
        listener.close()  # we die as well; who was connected may not have noticed yet
        assert nobody(SEIZE, port) == "in use\n"
