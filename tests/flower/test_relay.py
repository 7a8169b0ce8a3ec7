from __future__ import annotations

import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedwan.errors import ConfigError, IdentityError
from fedwan.flower.relay import Forwarder, FrontDoor
from fedwan.link import pki
from fedwan.link.tls import Identity


@pytest.fixture
def door(authority: Path, superlink: Any) -> Iterator[FrontDoor]:
    with closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as opened:
        opened.start(f"http://127.0.0.1:{superlink.server_port}")
        yield opened


def client_of(identity: Path) -> httpx.Client:
    tls = Identity.load(identity).ssl_context(server=False)
    return httpx.Client(verify=tls, trust_env=False)


def url(door: FrontDoor, path: str) -> str:
    return f"https://127.0.0.1:{door.port}{path}"


def test_a_sites_fleet_call_reaches_superlink_and_back(
    door: FrontDoor, superlink: Any, authority: Path
) -> None:
    body = bytes(range(256)) * 4096
    with client_of(authority / "s1") as client:
        headers = {"flwr-signature": "abc", "content-type": "application/x-protobuf"}
        answer = client.post(url(door, "/v1/fleet/pull-messages"), content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.content == body
    assert answer.headers["content-type"] == "application/x-protobuf"
    path, got, sent_headers = superlink.requests[0]
    assert (path, got) == ("/v1/fleet/pull-messages", body)
    assert {k.lower(): v for k, v in sent_headers.items()}["flwr-signature"] == "abc"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/control/start-run",
        "/v1/fleet/",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet//control/start-run",
        "//v1/fleet/pull-messages",
        "/v1/fleet/pull-messages?x=/v1/control/start-run",
        "/v1/fleet/pull-messages%00",
        "/V1/FLEET/pull-messages",
        "http://127.0.0.1/v1/fleet/pull-messages",
    ],
)
def test_nothing_but_a_plain_fleet_path_passes(
    door: FrontDoor, superlink: Any, authority: Path, path: str
) -> None:
    answer = raw_request(door, authority / "s1", f"POST {path} HTTP/1.1")
    assert answer.split()[1] in (b"404", b"400")
    assert superlink.requests == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "CONNECT"])
def test_no_method_but_post_passes(
    door: FrontDoor, superlink: Any, authority: Path, method: str
) -> None:
    answer = raw_request(door, authority / "s1", f"{method} /v1/fleet/pull-messages HTTP/1.1")
    assert answer.split()[1] == b"404"
    assert superlink.requests == []


def test_a_refused_request_leaves_one_line_with_the_sites_name(
    door: FrontDoor, authority: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), client_of(authority / "s2") as client:
        assert client.post(url(door, "/v1/control/start-run")).status_code == 404
    lines = [record.getMessage() for record in caplog.records if "fedwan" in record.name]
    assert lines == [
        "site s2 at 127.0.0.1 asked for 'POST /v1/control/start-run'; only Fleet calls pass"
    ]


def test_an_endless_body_is_cut_off(door: FrontDoor, superlink: Any, authority: Path) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield bytes(1 << 20)

    with client_of(authority / "s1") as client:
        try:
            answer = client.post(url(door, "/v1/fleet/push-object"), content=pieces())
            assert answer.status_code == 413
        except httpx.TransportError:
            pass  # The door hung up while we were still sending.
    assert superlink.requests == []


@pytest.mark.parametrize("who", ["nobody", "a foreign site", "the coordinator"])
def test_who_shows_no_site_s_certificate_gets_no_session(
    door: FrontDoor, authority: Path, foreign_authority: Path, who: str
) -> None:
    tls = ssl.create_default_context(cafile=str(authority / "ca" / "ca.crt"))
    if who != "nobody":
        own = authority / "coordinator" if "coord" in who else foreign_authority / "s1"
        tls.load_cert_chain(own / "identity.crt", own / "identity.key")
    with httpx.Client(verify=tls, trust_env=False) as client, pytest.raises(httpx.TransportError):
        client.post(url(door, "/v1/fleet/pull-messages"))


def test_old_tls_is_not_spoken(door: FrontDoor, authority: Path) -> None:
    tls = Identity.load(authority / "s1").ssl_context(server=False)
    with pytest.warns(DeprecationWarning):
        tls.minimum_version = ssl.TLSVersion.TLSv1
        tls.maximum_version = ssl.TLSVersion.TLSv1_1
    tls.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", door.port)) as plain, pytest.raises(OSError):
        tls.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_revoked_site_is_refused_on_the_connection_it_has(
    tmp_path: Path, superlink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pki.init(tmp_path, ["127.0.0.1"])
    pki.issue(tmp_path, "s1")
    with closing(FrontDoor(tmp_path / "coordinator", "127.0.0.1", 0)) as door:
        door.start(f"http://127.0.0.1:{superlink.server_port}")
        with client_of(tmp_path / "s1") as client:
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 200
            pki.revoke(tmp_path, "s1")
            answer = client.post(url(door, "/v1/fleet/pull-messages"))
    assert answer.status_code == 403
    assert "the certificate of site s1 is revoked" in answer.text
    assert len(superlink.requests) == 1


def test_superlink_away_is_503_and_does_not_hang(authority: Path) -> None:
    with closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as door:
        door.start("http://127.0.0.1:9")
        with client_of(authority / "s1") as client:
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 503


def test_an_error_of_superlink_s_is_503_which_flower_tries_again(
    authority: Path, superlink: Any
) -> None:
    """Its disk is full, or its database locked: a SuperNode that hears 500 asks no more."""
    superlink.statuses = [500]
    with closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as door:
        door.start(f"http://127.0.0.1:{superlink.server_port}")
        with client_of(authority / "s1") as client:
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 503
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 200


def test_a_sites_identity_cannot_open_a_door(authority: Path) -> None:
    with pytest.raises(IdentityError, match="site's certificate"):
        FrontDoor(authority / "s1", "127.0.0.1", 0)


def raw_request(door: FrontDoor, identity: Path, request_line: str) -> bytes:
    """The answer's first line to a request that no client library would send."""
    tls = Identity.load(identity).ssl_context(server=False)
    with (
        socket.create_connection(("127.0.0.1", door.port), timeout=5) as plain,
        tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        headers = "host: 127.0.0.1\r\ncontent-length: 0\r\n\r\n"
        connection.sendall(f"{request_line}\r\n{headers}".encode())
        return connection.recv(4096).splitlines()[0]


@contextmanager
def running(identity: Path, door: str) -> Iterator[Forwarder]:
    with closing(Forwarder(identity, door)) as forwarder:
        forwarder.start(f"https://{door}")
        yield forwarder


def post(forwarder: Forwarder, path: str = "/v1/fleet/pull-messages") -> httpx.Response:
    with httpx.Client(trust_env=False) as client:
        return client.post(f"http://127.0.0.1:{forwarder.port}{path}", content=b"x", timeout=30)


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
        door.start(f"http://127.0.0.1:{superlink.server_port}")
        assert post(forwarder).content == b"x"
        assert [path for path, _, _ in superlink.requests] == ["/v1/fleet/pull-messages"]
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


@pytest.mark.parametrize("name", ["pull-messages", "send-node-heartbeat"])
def test_an_answer_lost_on_the_way_is_noticed_and_not_asked_for_again(
    authority: Path, name: str
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running(authority / "s1", f"127.0.0.1:{listener.getsockname()[1]}") as forwarder,
    ):
        server = threading.Thread(
            target=echo_server, args=(listener, authority / "coordinator", [b""])
        )
        server.start()
        assert post(forwarder, f"/v1/fleet/{name}").status_code == 502
        server.join(timeout=5)
        assert forwarder.take_lost() == (name == "pull-messages")  # a heartbeat carries nothing
        assert not forwarder.take_lost()
        assert forwarder.refusal is None


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
        door.start("http://127.0.0.1:9")
        assert "did not prove to be this run's coordinator" in refusal_of(forwarder)


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
        door.start("http://127.0.0.1:9")
        if when == "while it was open":
            pki.revoke(tmp_path, "s1")
        assert "revoked" in refusal_of(forwarder).lower()


def test_a_door_without_a_port_is_one_line(authority: Path) -> None:
    with pytest.raises(ConfigError, match=r"door = 'coordinator\.example\.com' is no host:port"):
        Forwarder(authority / "s1", "coordinator.example.com")
