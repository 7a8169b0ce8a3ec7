"""Who may come in: real certificates, a real server, and one clear line for everybody else."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedwan.config import LinkConfig
from fedwan.errors import IdentityError, JoinRefused
from fedwan.flower.processes import listen
from fedwan.link import client, pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.admission import Renewable
from fedwan.link.client import GrpcLink
from fedwan.link.rpc import ByteCounter, Stub
from fedwan.link.tcp import read_state
from fedwan.link.tls import Identity, handshake_complaint
from tests.planes import (
    Bench,
    dialling,
    eventually,
    header_of,
    in_thread,
    joined_through_proxy,
    payload_of,
    serving,
)

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
    return Bench(tmp_path, sites=("s1", "s2"))


def test_without_a_certificate_of_this_run_and_this_site_there_is_no_entry(
    bench: Bench, identities: Path, foreign_identities: Path
) -> None:
    with serving(bench.hub, identities) as plane:
        address = f"127.0.0.1:{plane.port}"
        ca = (identities / "s1" / "ca.crt").read_bytes()
        nobody = grpc.ssl_channel_credentials(root_certificates=ca)
        for channel in (grpc.secure_channel(address, nobody), grpc.insecure_channel(address)):
            with channel, pytest.raises(grpc.RpcError) as caught:
                stub = Stub(channel, ByteCounter(), "", Identity.load(identities / "s1"))
                stub.Join(bench.hello("s1"), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        text = refused(bench, plane.port, foreign_identities / "s1")
        assert "no TLS session with 127.0.0.1" in text and "this run's authority has signed" in text
        assert not bench.events
        text = refused(bench, plane.port, identities / "s2", as_site="s1")
        assert "calls itself 's1' but its certificate says 's2'" in text
        text = refused(bench, plane.port, identities / "s3", as_site="s3")
        assert "site 's3' is not in this run, which has s1, s2; ask whoever runs it" in text


def test_a_proxy_of_the_environment_is_not_asked(
    bench: Bench, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy, serving(bench.hub, identities) as plane:
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        channel = client.dial(f"127.0.0.1:{plane.port}", Identity.load(identities / "s1"))
        with channel:
            grpc.channel_ready_future(channel).result(timeout=5)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_coordinator_listens_on_an_address_of_ipv6(
    bench: Bench, tmp_path: Path, host: str
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    pki.federation(tmp_path / "pki", ["::1"], ["s1"])
    identity = Identity.load(tmp_path / "pki" / "s1")
    with serving(bench.hub, tmp_path / "pki", LinkConfig(f"[{host}]:0")) as plane:
        address = f"[::1]:{plane.port}"
        assert handshake_complaint(address, identity) is None
        with contextlib.closing(GrpcLink(address, identity, LinkConfig(), patience_s=5.0)) as link:
            assert not link.join(bench.hello("s1")).refusal
            payload = payload_of(1.0, bench.layout)
            assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
            assert read_state(address).moved > payload.num_bytes


@pytest.mark.parametrize("host", ["::", "::1", "0.0.0.0"])
def test_the_front_door_listens_on_addresses_of_both_kinds_where_it_is_given_all_of_ipv6(
    host: str,
) -> None:
    def takes(there: str, port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((there, port), timeout=5.0):
            return True
        return False

    with listen(f"[{host}]:0" if ":" in host else f"{host}:0", "link.door") as door:
        port = door.getsockname()[1]
        assert takes("127.0.0.1", port) == (host != "::1")
        assert takes("::1", port) == (":" in host)


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


def test_a_stranger_on_the_path_ends_no_site_that_the_coordinator_has_answered(
    bench: Bench, identities: Path, foreign_identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a minute of wrong DNS, too."""
    payload, complaints = payload_of(1.0, bench.layout), []

    def noted(*args: Any) -> str | None:
        complaints.append(handshake_complaint(*args))
        return complaints[-1]

    monkeypatch.setattr(client, "handshake_complaint", noted)
    with (
        joined_through_proxy(bench, identities) as (link, proxy),
        serving(bench.hub, foreign_identities) as stranger,
    ):
        ours, proxy._target_port = proxy._target_port, stranger.port
        proxy.cut()
        uploading = in_thread(lambda: link.upload(header_of(payload), payload))
        eventually(lambda: any(complaints))
        proxy._target_port = ours
        assert uploading().status == wire.Receipt.ACCEPTED
