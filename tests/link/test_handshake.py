"""Who may come in: real certificates, a real server, and one clear line for everybody else."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from fedwan.errors import IdentityError, JoinRefused
from fedwan.link import certificates, pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.admission import Renewable
from fedwan.link.client import GrpcLink
from fedwan.link.rpc import ByteCounter, Stub
from fedwan.link.tls import Identity, handshake_complaint, now
from tests.planes import Bench, dialling, header_of, payload_of, serving, stub_of

SECONDS = 8.0
"""A refusal comes within so long, whatever `patience_s` is."""


def refused(bench: Bench, port: int, folder: Path, as_site: str = "s1") -> str:
    """The one line that a site is refused with."""
    began = time.monotonic()
    with (
        dialling(port, folder, patience_s=300.0) as link,
        pytest.raises((IdentityError, JoinRefused)) as caught,
    ):
        link.join(bench.hello(as_site))
    assert time.monotonic() - began < SECONDS
    text = str(caught.value)
    assert "\n" not in text
    assert all(not entry.session for entry in bench.registry.sites.values())
    return text


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    return bench


def test_no_certificate_is_no_entry(bench: Bench, identities: Path) -> None:
    with serving(bench.hub, identities) as plane:
        ca = (identities / "s1" / "ca.crt").read_bytes()
        credentials = grpc.ssl_channel_credentials(root_certificates=ca)
        with grpc.secure_channel(f"127.0.0.1:{plane.port}", credentials) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                Stub(channel, ByteCounter(), "").Join(bench.hello("s1"), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with grpc.insecure_channel(f"127.0.0.1:{plane.port}") as channel:
            with pytest.raises(grpc.RpcError):
                Stub(channel, ByteCounter(), "").Join(bench.hello("s1"), timeout=5)
    assert not bench.events


def test_another_authority_s_certificate_and_another_site_s_are_no_entry(
    bench: Bench, identities: Path, foreign_identities: Path
) -> None:
    with serving(bench.hub, identities) as plane:
        text = refused(bench, plane.port, foreign_identities / "s1")
        assert "no TLS session with 127.0.0.1" in text and "this run's authority has signed" in text
        text = refused(bench, plane.port, identities / "s2", as_site="s1")
        assert "calls itself 's1' but its certificate says 's2'" in text


def test_a_connection_that_is_merely_closed_after_the_handshake_is_no_complaint(
    identities: Path,
) -> None:
    """As a coordinator that ends does, or anybody on the path."""
    server_side = Identity.load(identities / "coordinator", "coordinator").ssl_context(server=True)
    server_side.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        done = threading.Event()

        def close_each() -> None:
            server.settimeout(0.1)
            while not done.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as raw:
                    raw.settimeout(5)
                    server_side.wrap_socket(raw, server_side=True).close()

        closing = pool.submit(close_each)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        complaint = handshake_complaint(address, Identity.load(identities / "s1"))
        done.set()
        closing.result()
    assert complaint is None


def expired_identity(authority: pki.Authority, monkeypatch: pytest.MonkeyPatch) -> Identity:
    """A certificate of the run's own authority whose time has passed since it was loaded."""
    monkeypatch.setattr(certificates, "now", lambda: now() - timedelta(days=1, seconds=-2))
    authority.renew("s1", days=1)
    monkeypatch.undo()
    identity = Identity.load(authority.directory / "s1")
    time.sleep((identity.expires - now()).total_seconds() + 0.2)
    return identity


def test_a_certificate_that_expires_after_it_was_loaded_is_no_entry(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = pki.federation(tmp_path / "pki", ["127.0.0.1"], ["s1"])
    identity = expired_identity(authority, monkeypatch)
    with pytest.raises(IdentityError, match="expired"):
        Identity.load(tmp_path / "pki" / "s1")
    with serving(bench.hub, tmp_path / "pki") as plane:
        complaint = handshake_complaint(f"127.0.0.1:{plane.port}", identity)
        link = GrpcLink(f"127.0.0.1:{plane.port}", identity)
        began = time.monotonic()
        with pytest.raises(IdentityError, match="our certificate .*it expired on 20"):
            link.join(bench.hello("s1"))
        link.close()
    assert time.monotonic() - began < SECONDS
    assert complaint is not None and "it expired on" in complaint


def test_a_site_is_not_believed_to_be_a_coordinator(
    bench: Bench, identities: Path, tmp_path: Path
) -> None:
    """A site that listens in the coordinator's place gets no weights."""
    fake = tmp_path / "fake"
    shutil.copytree(identities / "s2", fake / "coordinator")
    identity = Identity.load(fake / "coordinator", "site")
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        port = server.add_secure_port("127.0.0.1:0", Renewable(identity).grpc_server_credentials())
        server.start()
        try:
            text = refused(bench, port, identities / "s1")
        finally:
            server.stop(0).wait()
    assert "its certificate is not accepted here" in text


def test_a_certificate_revoked_while_the_coordinator_runs_is_no_entry(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    authority = pki.federation(folder, [], ["s1"])
    bench = Bench(tmp_path)
    model = bench.set_model()
    payload = payload_of(1.0, bench.layout)
    with serving(bench.hub, folder) as plane:
        with dialling(plane.port, folder / "s1", patience_s=300.0) as link:
            link.join(bench.hello("s1"))
            authority.revoke("s1")
            with pytest.raises(IdentityError, match="certificate of s1 is revoked; have another"):
                link.upload(header_of(payload), payload)
        with dialling(plane.port, folder / "s1", patience_s=300.0) as link:
            with pytest.raises(IdentityError, match="revoked"):
                link.join(bench.hello("s1", "again"))
    assert bench.hub.shut_out["s1"].startswith("the certificate of s1 is revoked; have another")
    assert bench.contribution("s1") is None and not model.state["net/w"].any()


def test_the_journal_says_with_which_certificate_a_site_has_joined(
    bench: Bench, identities: Path
) -> None:
    pem = Identity.load(identities / "s1").cert_pem
    serial = f"{x509.load_pem_x509_certificate(pem).serial_number:x}"
    hello = bench.hello("s1")
    hello.certificate = "mine"
    with serving(bench.hub, identities) as plane, dialling(plane.port, identities / "s1") as link:
        link.join(hello)
    assert bench.events[0] == ("join", "s1", f"s1 joined, certificate {serial}")


def test_a_site_that_is_not_of_the_run_can_do_nothing(tmp_path: Path, identities: Path) -> None:
    bench = Bench(tmp_path, sites=("s1", "s2"))
    with serving(bench.hub, identities) as plane:
        text = refused(bench, plane.port, identities / "s3", as_site="s3")
        assert (
            "site 's3' is not in this run, which has s1, s2; ask whoever runs it to add it" in text
        )
        with stub_of(plane.port, identities / "s3") as stub:
            request = wire.DownloadRequest(run_id="run-1", kind=wire.DownloadRequest.GLOBAL)
            for call in (
                lambda: list(stub.Download(request)),
                lambda: list(stub.Control(iter([wire.SiteSignal(session="x")]))),
                lambda: stub.Leave(wire.Farewell(session="")),
                lambda: stub.Report(wire.QualityReport(run_id="run-1", figures_json="{}")),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "has not joined this run" in caught.value.details()
