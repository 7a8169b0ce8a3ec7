from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedwan.errors import ConfigError, IdentityError
from fedwan.flower.door import FrontDoor
from fedwan.link import pki
from fedwan.link.tls import Identity


@pytest.fixture
def door(authority: Path, superlink: Any) -> Iterator[FrontDoor]:
    with closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as opened:
        opened.open(f"http://127.0.0.1:{superlink.server_port}")
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
        "/health",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/",
        "/v1/fleet",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/.%2e/control/start-run",
        "/v1/fleet//control/start-run",
        "//v1/fleet/pull-messages",
        "/v1//fleet/pull-messages",
        "/v1/fleet/..;/control/start-run",
        "/v1/fleet/pull-messages?x=/v1/control/start-run",
        "/v1/fleet/pull-messages%00",
        "/V1/FLEET/pull-messages",
        "/v1/fleet\\..\\control\\start-run",
        "http://127.0.0.1/v1/control/start-run",
        "http://127.0.0.1/v1/fleet/pull-messages",
    ],
)
def test_nothing_but_a_plain_fleet_path_passes(
    door: FrontDoor, superlink: Any, authority: Path, path: str
) -> None:
    answer = raw_request(door, authority / "s1", f"POST {path} HTTP/1.1")
    assert answer.split()[1] in (b"404", b"400")
    assert superlink.requests == []


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "CONNECT", "OPTIONS", "TRACE"])
def test_no_method_but_post_passes(
    door: FrontDoor, superlink: Any, authority: Path, method: str
) -> None:
    answer = raw_request(door, authority / "s1", f"{method} /v1/fleet/pull-messages HTTP/1.1")
    assert answer.split()[1] == b"404"
    assert superlink.requests == []


def test_a_second_request_hidden_in_a_body_stays_a_body(
    door: FrontDoor, superlink: Any, authority: Path
) -> None:
    hidden = b"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    with client_of(authority / "s1") as client:
        client.post(url(door, "/v1/fleet/pull-messages"), content=hidden)
    assert [(path, body) for path, body, _ in superlink.requests] == [
        ("/v1/fleet/pull-messages", hidden)
    ]


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
        except (httpx.WriteError, httpx.ReadError):
            pass  # The door hung up while we were still sending.
    assert superlink.requests == []


def test_without_a_certificate_there_is_no_session(door: FrontDoor, authority: Path) -> None:
    tls = ssl.create_default_context(cafile=str(authority / "ca" / "ca.crt"))
    with httpx.Client(verify=tls, trust_env=False) as client, pytest.raises(httpx.TransportError):
        client.post(url(door, "/v1/fleet/pull-messages"))


def test_a_certificate_of_another_authority_gets_no_session(
    door: FrontDoor, authority: Path, foreign_authority: Path
) -> None:
    tls = ssl.create_default_context(cafile=str(authority / "ca" / "ca.crt"))
    foreign = foreign_authority / "s1"
    tls.load_cert_chain(foreign / "identity.crt", foreign / "identity.key")
    with httpx.Client(verify=tls, trust_env=False) as client, pytest.raises(httpx.TransportError):
        client.post(url(door, "/v1/fleet/pull-messages"))


def test_the_coordinators_own_certificate_is_not_a_sites(door: FrontDoor, authority: Path) -> None:
    tls = ssl.create_default_context(cafile=str(authority / "ca" / "ca.crt"))
    own = authority / "coordinator"
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
        door.open(f"http://127.0.0.1:{superlink.server_port}")
        with client_of(tmp_path / "s1") as client:
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 200
            pki.revoke(tmp_path, "s1")
            answer = client.post(url(door, "/v1/fleet/pull-messages"))
    assert answer.status_code == 403
    assert "the certificate of site s1 is revoked" in answer.text
    assert len(superlink.requests) == 1


def test_a_site_revoked_before_the_door_opened_is_told_why(tmp_path: Path, superlink: Any) -> None:
    pki.init(tmp_path, ["127.0.0.1"])
    pki.issue(tmp_path, "s1")
    pki.revoke(tmp_path, "s1")
    with closing(FrontDoor(tmp_path / "coordinator", "127.0.0.1", 0)) as door:
        door.open(f"http://127.0.0.1:{superlink.server_port}")
        with client_of(tmp_path / "s1") as client:
            answer = client.post(url(door, "/v1/fleet/register-node"))
    assert answer.status_code == 403
    assert "revoked" in answer.text
    assert superlink.requests == []


def test_superlink_away_is_503_and_does_not_hang(authority: Path) -> None:
    with closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as door:
        door.open("http://127.0.0.1:9")
        with client_of(authority / "s1") as client:
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 503


def test_an_error_of_superlink_s_is_503_which_flower_tries_again(
    authority: Path, superlink: Any
) -> None:
    """Its disk is full, or its database locked: a SuperNode that hears 500 asks no more."""
    superlink.statuses = [500]
    with closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as door:
        door.open(f"http://127.0.0.1:{superlink.server_port}")
        with client_of(authority / "s1") as client:
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 503
            assert client.post(url(door, "/v1/fleet/pull-messages")).status_code == 200


def test_a_port_in_use_is_one_line_with_the_port_and_the_key(authority: Path) -> None:
    with closing(FrontDoor(authority / "coordinator", "127.0.0.1", 0)) as first:
        port = first.port
        with pytest.raises(ConfigError) as error:
            FrontDoor(authority / "coordinator", "127.0.0.1", port)
    text = str(error.value)
    assert f"127.0.0.1:{port}" in text
    assert "link.door" in text
    assert "\n" not in text


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
