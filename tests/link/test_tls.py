"""Identities against real certificates, real sockets and a real gRPC server."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from fedwan.errors import IdentityError
from fedwan.link import pki
from fedwan.link.tls import Identity, RevocationList, now


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    pki.init(tmp_path, [])
    pki.issue(tmp_path, "s1")
    pki.issue(tmp_path, "s2")
    return tmp_path


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    directory = tmp_path / "foreign"
    pki.init(directory, [])
    pki.issue(directory, "s1")
    return directory


def test_an_issued_identity_loads_with_its_name_and_expiry(folders: Path) -> None:
    site = Identity.load(folders / "s1")
    assert (site.name, site.role) == ("s1", "site") and "PRIVATE" not in repr(site)
    assert site.expires - now() > timedelta(days=pki.IDENTITY_DAYS - 1)
    assert Identity.load(folders / "coordinator", "coordinator").name == "coordinator"


@pytest.mark.parametrize("name", ["ca.crt", "identity.crt", "identity.key"])
def test_a_missing_or_damaged_file_is_named(folders: Path, name: str) -> None:
    path = folders / "s1" / name
    path.write_text("-----BEGIN NONSENSE-----\n")
    with pytest.raises(IdentityError, match=f"{name} cannot be parsed"):
        Identity.load(folders / "s1")
    path.unlink()
    with pytest.raises(IdentityError, match=f"{name} is missing"):
        Identity.load(folders / "s1")


def test_a_key_that_others_can_read_is_refused_with_the_mend(folders: Path) -> None:
    (folders / "s1" / "identity.key").chmod(0o640)
    with pytest.raises(IdentityError, match="mode 0640, readable by others; run: chmod 600"):
        Identity.load(folders / "s1")


def test_another_key_and_another_authority_are_refused(folders: Path, foreign: Path) -> None:
    (folders / "s2" / "identity.key").write_bytes((folders / "s1" / "identity.key").read_bytes())
    with pytest.raises(IdentityError, match="does not belong"):
        Identity.load(folders / "s2")
    (folders / "s1" / "ca.crt").write_bytes((foreign / "s1" / "ca.crt").read_bytes())
    with pytest.raises(IdentityError, match="foreign authority"):
        Identity.load(folders / "s1")


@pytest.mark.parametrize(("days", "says"), [(-99, "expired on"), (1, "not valid before")])
def test_a_certificate_of_another_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, says: str
) -> None:
    monkeypatch.setattr(pki, "now", lambda: now() + timedelta(days=days))
    pki.init(tmp_path, [])
    pki.issue(tmp_path, "s1")
    with pytest.raises(IdentityError, match=says):
        Identity.load(tmp_path / "s1")


def test_each_role_refuses_the_others_certificate(folders: Path) -> None:
    with pytest.raises(IdentityError, match="a site's certificate; give the folder of a coord"):
        Identity.load(folders / "s1", "coordinator")
    with pytest.raises(IdentityError, match="a coordinator's certificate; give the folder of a s"):
        Identity.load(folders / "coordinator", "site")


def serial_of(folder: Path) -> int:
    pem = (folder / "identity.crt").read_bytes()
    return x509.load_pem_x509_certificate(pem).serial_number


class TestRevocationList:
    def test_a_new_list_is_noticed_without_a_restart(self, folders: Path) -> None:
        revocations = RevocationList(folders / "coordinator")
        first, second = serial_of(folders / "s1"), serial_of(folders / "s2")
        assert not RevocationList(folders / "s1").is_revoked(first)  # without a list
        assert not revocations.is_revoked(first)
        pki.revoke(folders, "s1")
        assert revocations.is_revoked(first) and not revocations.is_revoked(second)
        pki.revoke(folders, "s2")
        assert revocations.is_revoked(second)

    def test_a_list_of_another_authority_is_refused(self, folders: Path, foreign: Path) -> None:
        (folders / "coordinator" / "crl.pem").write_bytes(
            (foreign / "coordinator" / "crl.pem").read_bytes()
        )
        with pytest.raises(IdentityError, match="was not signed by"):
            RevocationList(folders / "coordinator")

    def test_a_list_that_breaks_later_keeps_the_revoked_out(self, folders: Path) -> None:
        pki.revoke(folders, "s1")
        revocations = RevocationList(folders / "coordinator")
        (folders / "coordinator" / "crl.pem").write_text("half a fi")
        assert revocations.is_revoked(serial_of(folders / "s1"))
        (folders / "coordinator" / "crl.pem").unlink()
        assert revocations.is_revoked(serial_of(folders / "s1"))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> bytes:
    """What the server hears over a real socket, after both ends finished the handshake."""
    listener = socket.create_server(("127.0.0.1", 0))
    failures: list[Exception] = []

    def accept() -> None:
        try:
            raw, _ = listener.accept()
            with server.wrap_socket(raw, server_side=True) as connection:
                connection.sendall(connection.recv(5))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with socket.create_connection(listener.getsockname()[:2], timeout=5) as raw:
            with client.wrap_socket(raw, server_hostname=host) as connection:
                connection.sendall(b"hello")
                # TLS 1.3 tells a refused peer only when it reads.
                return connection.recv(5)
    finally:
        thread.join()
        listener.close()


class TestSslContext:
    def test_a_site_and_its_coordinator_shake_hands(self, folders: Path) -> None:
        server = Identity.load(folders / "coordinator", "coordinator").ssl_context(server=True)
        site = Identity.load(folders / "s1").ssl_context(server=False)
        assert handshake(server, site) == b"hello"
        assert handshake(server, site, "127.0.0.1") == b"hello"
        assert server.minimum_version == ssl.TLSVersion.TLSv1_2

    def test_a_server_turns_away_whoever_shows_no_site_s_certificate(
        self, folders: Path, foreign: Path
    ) -> None:
        server = Identity.load(folders / "coordinator", "coordinator").ssl_context(server=True)
        coordinator = Identity.load(folders / "coordinator", "coordinator").ssl_context(False)
        nobody = ssl.create_default_context(cafile=str(folders / "ca" / "ca.crt"))
        stranger = ssl.create_default_context(cafile=str(folders / "ca" / "ca.crt"))
        stranger.load_cert_chain(foreign / "s1" / "identity.crt", foreign / "s1" / "identity.key")
        for context in (nobody, stranger, coordinator):
            with pytest.raises(OSError):
                assert handshake(server, context) == b"hello"

    def test_a_site_refuses_another_authority_another_host_and_another_site(
        self, folders: Path, foreign: Path
    ) -> None:
        site = Identity.load(folders / "s1").ssl_context(server=False)
        ours = Identity.load(folders / "coordinator", "coordinator").ssl_context(server=True)
        theirs = Identity.load(foreign / "coordinator", "coordinator").ssl_context(server=True)
        impostor = Identity.load(folders / "s2").ssl_context(server=True)
        for server, host in [(theirs, "localhost"), (ours, "example.com"), (impostor, "s2")]:
            with pytest.raises(ssl.SSLCertVerificationError):
                handshake(server, site, host)
