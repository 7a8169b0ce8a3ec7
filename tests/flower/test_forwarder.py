from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedwan.errors import ConfigError, IdentityError
from fedwan.flower.door import FrontDoor
from fedwan.flower.forwarder import Forwarder
from fedwan.link import pki
from fedwan.link.tls import Identity


class running:
    """A forwarder between start and stop."""

    def __init__(self, identity: Path, door: str) -> None:
        self._forwarder = Forwarder(identity, door)

    def __enter__(self) -> Forwarder:
        self._forwarder.start()
        return self._forwarder

    def __exit__(self, *error: object) -> None:
        self._forwarder.stop()


def post(forwarder: Forwarder, path: str = "/v1/fleet/pull-messages") -> httpx.Response:
    with httpx.Client(trust_env=False) as client:
        return client.post(f"http://{forwarder.address}{path}", content=b"x", timeout=30)


def read_request(connection: socket.socket) -> None:
    """All of a request: closing before its end would take the answer down with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(65536)):
            return
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    missing = int(length[1]) - len(body) if length else 0
    while missing > 0 and (part := connection.recv(65536)):
        missing -= len(part)


def echo_server(listener: socket.socket, identity: Path, answers: list[bytes]) -> None:
    """Speaks TLS as the door does, and gives each connection the next canned answer."""
    tls = Identity.load(identity, role="coordinator").ssl_context(server=True)
    for answer in answers:
        plain, _ = listener.accept()
        with tls.wrap_socket(plain, server_side=True) as connection:
            read_request(connection)
            if answer:
                connection.sendall(answer)


def test_a_supernodes_call_reaches_superlink_and_back(authority: Path, superlink: Any) -> None:
    with (
        closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as door,
        running(authority / "s1", f"127.0.0.1:{door.port}") as forwarder,
    ):
        door.open(f"http://127.0.0.1:{superlink.server_port}")
        assert post(forwarder).content == b"x"
        assert [path for path, _, _ in superlink.requests] == ["/v1/fleet/pull-messages"]
        assert not forwarder.take_lost()


def test_a_call_waits_for_a_superlink_that_comes_later(
    authority: Path, late_superlink: tuple[int, Callable[[], Any]]
) -> None:
    superlink_port, start_superlink = late_superlink
    with (
        closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as door,
        running(authority / "s1", f"127.0.0.1:{door.port}") as forwarder,
    ):
        door.open(f"http://127.0.0.1:{superlink_port}")
        got: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: got.append(post(forwarder)))
        caller.start()
        time.sleep(1.0)
        assert got == []
        start_superlink()
        caller.join(timeout=10)
        assert got[0].content == b"x"
        assert not forwarder.take_lost()


def test_a_call_that_superlink_failed_at_is_repeated_until_it_succeeds(
    authority: Path, superlink: Any
) -> None:
    superlink.statuses = [500, 500]
    with (
        closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as door,
        running(authority / "s1", f"127.0.0.1:{door.port}") as forwarder,
    ):
        door.open(f"http://127.0.0.1:{superlink.server_port}")
        assert post(forwarder).content == b"x"
        assert len(superlink.requests) == 3
        assert not forwarder.take_lost()


def test_other_paths_do_not_leave_the_site(authority: Path) -> None:
    with running(authority / "s1", "127.0.0.1:9") as forwarder:
        assert post(forwarder, "/v1/control/start-run").status_code == 404
        assert post(forwarder, "/v1/fleet/%2e%2e/control/start-run").status_code == 404


def test_a_call_waits_for_a_door_that_comes_later(authority: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]
    with running(authority / "s1", f"127.0.0.1:{port}") as forwarder:
        got: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: got.append(post(forwarder)))
        caller.start()
        time.sleep(1.0)
        with socket.create_server(("127.0.0.1", port)) as late:
            echo_server(late, authority / "coordinator", answers)
            caller.join(timeout=10)
        assert got[0].text == "ok"
        assert not forwarder.take_lost()


def test_an_answer_lost_on_the_way_is_noticed_and_not_asked_for_again(authority: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running(authority / "s1", f"127.0.0.1:{listener.getsockname()[1]}") as forwarder,
    ):
        server = threading.Thread(
            target=echo_server, args=(listener, authority / "coordinator", [b""])
        )
        server.start()
        assert post(forwarder).status_code == 502
        server.join(timeout=5)
        assert forwarder.take_lost()
        assert not forwarder.take_lost()
        assert forwarder.refusal is None


def test_a_lost_heartbeat_is_no_loss(authority: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running(authority / "s1", f"127.0.0.1:{listener.getsockname()[1]}") as forwarder,
    ):
        server = threading.Thread(
            target=echo_server, args=(listener, authority / "coordinator", [b""])
        )
        server.start()
        post(forwarder, "/v1/fleet/send-node-heartbeat")
        server.join(timeout=5)
        assert not forwarder.take_lost()


def refusal_of(forwarder: Forwarder) -> str:
    caller = threading.Thread(target=lambda: post(forwarder), daemon=True)
    caller.start()
    deadline = time.monotonic() + 10
    while forwarder.refusal is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(forwarder.refusal, IdentityError)
    assert "\n" not in str(forwarder.refusal)
    return str(forwarder.refusal)


def test_a_door_of_another_authority_is_not_trusted(
    authority: Path, foreign_authority: Path
) -> None:
    with (
        closing(FrontDoor(foreign_authority / "coordinator", "127.0.0.1", 0)) as door,
        running(authority / "s1", f"127.0.0.1:{door.port}") as forwarder,
    ):
        door.open("http://127.0.0.1:9")
        assert "did not prove to be this run's coordinator" in refusal_of(forwarder)


def test_a_door_under_another_name_is_not_trusted(tmp_path: Path, authority: Path) -> None:
    with (
        closing(FrontDoor(authority / "coordinator", "127.0.0.2", 0)) as door,
        running(authority / "s1", f"127.0.0.2:{door.port}") as forwarder,
    ):
        door.open("http://127.0.0.1:9")
        assert "IP address mismatch" in refusal_of(forwarder)


def test_another_site_cannot_stand_in_for_the_door(authority: Path) -> None:
    with pytest.raises(IdentityError):
        FrontDoor(authority / "s2", "127.0.0.1", 0)


@pytest.mark.parametrize("when", ["before the door opened", "while it was open"])
def test_a_revoked_site_learns_it_in_one_line(tmp_path: Path, when: str) -> None:
    pki.init(tmp_path, ["127.0.0.1"])
    pki.issue(tmp_path, "s1")
    if when == "before the door opened":
        pki.revoke(tmp_path, "s1")
    with (
        closing(FrontDoor(tmp_path / "coordinator", "127.0.0.1", 0)) as door,
        running(tmp_path / "s1", f"127.0.0.1:{door.port}") as forwarder,
    ):
        door.open("http://127.0.0.1:9")
        if when == "while it was open":
            pki.revoke(tmp_path, "s1")
        assert "revoked" in refusal_of(forwarder).lower()


def test_a_door_without_a_port_is_one_line(authority: Path) -> None:
    with pytest.raises(ConfigError, match=r"door is 'coordinator\.example\.com', not host:port"):
        Forwarder(authority / "s1", "coordinator.example.com")
