"""Ports and files of a run, seen by another user of the machine; root alone can act as one."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedwan.flower import private_port
from fedwan.flower.private_port import HOST, PrivateProtocol, owner_of
from fedwan.flower.processes import Service, last_line
from tests.flower.fleet import as_nobody, nobody
from tests.planes import eventually

SEIZE = """
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(sys.argv[1])))
        print("seized")
    except OSError:
        print("in use")
"""


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
        status = 200 if scope["path"] == "/" else 500
        await send({"type": "http.response.start", "status": status, "headers": []})
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
    service = Service("it", argv, tmp_path / "log", os.environ, inherited=[listener])
    with socket.create_connection((HOST, port), timeout=30) as caller:
        # A heartbeat that could not be noted is asked for again, as nobody does at a 500.
        for path, status in (("/", 200), ("/x/send-task-heartbeat", 503), ("/x/push", 500)):
            caller.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            answer = caller.recv(1000)
            assert answer.startswith(f"HTTP/1.1 {status}".encode()), last_line(service.log)
            while not answer.endswith(b"0\r\n\r\n"):
                answer += caller.recv(1000)
        os.kill(service.pid, signal.SIGKILL)
        eventually(lambda: service.poll() is not None)
        assert nobody(SEIZE, port) == "in use\n"
        listener.close()  # we die as well; who was connected may not have noticed yet
        assert nobody(SEIZE, port) == "in use\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells")
@pytest.mark.parametrize(("owner", "is_cut"), [(os.geteuid(), 0), (os.geteuid() + 1, 1), (None, 1)])
def test_who_is_not_seen_to_be_this_user_is_cut_off_also_who_has_hung_up(
    owner: int | None, is_cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_port, "owner_of", lambda *_: owner)
    monkeypatch.setattr(H11Protocol, "connection_made", lambda *_: None)
    transport = Mock(get_extra_info=lambda name: (HOST, 1))
    PrivateProtocol.__new__(PrivateProtocol).connection_made(transport)
    assert transport.abort.call_count == is_cut
