"""Identities are renewed, revoked and expire while a site takes part, over real sockets."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedwan.config import LinkConfig
from fedwan.errors import IdentityError, LinkLost
from fedwan.files import replace_bytes
from fedwan.link import admission, certificates, client, pki, server, tls
from fedwan.link import wire_pb2 as wire
from fedwan.link.admission import Renewable
from fedwan.link.base import Link
from fedwan.link.client import GrpcLink
from fedwan.link.tls import Identity, Role, now
from tests.planes import (
    LINK,
    Bench,
    Wires,
    await_control,
    dialling,
    eventually,
    header_of,
    in_thread,
    joined,
    let_lapse,
    payload_of,
    serving,
)
from tests.support import WrappedLink, run_tiny, tiny_config

LASTS_S = 3.0
ENDS_S = 10.0
"""An open stream ends within so long of its certificate."""


@pytest.fixture
def renew_for(authority: pki.Authority, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Renews an identity so that it expires that many seconds from now; looks are frequent."""
    monkeypatch.setattr(server, "PEERS_S", 0.2)

    def renew(name: str, seconds: float) -> None:
        monkeypatch.setattr(certificates, "now", lambda: now() - timedelta(1, -seconds))
        authority.renew(name, days=1)
        monkeypatch.setattr(certificates, "now", now)

    return renew


@pytest.mark.slow
def test_a_site_and_its_coordinator_renew_twice_and_no_round_is_lost(
    authority: pki.Authority, renew_for: Callable[..., None], tmp_path: Path
) -> None:
    """Each certificate is replaced while it is valid, and has expired before the next."""
    folder, bench = authority.directory, Bench(tmp_path)
    renew_for("s1", LASTS_S)
    renew_for("coordinator", LASTS_S)
    payload = payload_of(1.0, bench.layout)
    with joined(bench, folder) as link:
        for _ in range(2):
            for name in ("s1", "coordinator"):
                renew_for(name, LASTS_S)
            expires = Identity.load(folder / "s1").expires
            while now() < expires - timedelta(seconds=1):
                header = header_of(payload)
                assert link.upload(header, payload).status == wire.Receipt.ACCEPTED
                time.sleep(0.2)
        for name in ("s1", "coordinator"):
            renew_for(name, 60.0)
        time.sleep((expires - now()).total_seconds() + 0.6)
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
        assert link.signals.empty()
        assert len(link._channels) == 2 * len(link._stubs)


@pytest.mark.slow
def test_of_a_run_of_a_hundred_days_no_round_is_lost_though_certificates_last_for_45(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day a round, by a clock of fedwan's own checks; those of TLS go by the machine's.

    So certificates begin long before, and none is over by the machine's clock.
    """
    days, config = [0], tiny_config(h=3, steps=300, sites=2)
    expected = run_tiny(tmp_path / "undisturbed", config).hashes
    for module in (admission, certificates, client, pki, tls):
        monkeypatch.setattr(module, "now", lambda: now() + timedelta(days=days[0]))
    monkeypatch.setattr(certificates, "_CLOCK_SKEW", timedelta(days=200))
    authority = pki.federation(tmp_path / "pki", ["127.0.0.1"], ["s1", "s2"])
    links: dict[str, GrpcLink] = {}
    expiries: dict[str, set[datetime]] = defaultdict(set)

    def renew() -> None:
        for name in ("coordinator", "s1", "s2"):
            authority.renew(name, days=45)
            role: Role = "coordinator" if name == "coordinator" else "site"
            expiries[name].add(Identity.load(authority.directory / name, role).expires)
        for name, link in links.items():
            eventually(lambda n=name, at=link: at._renewable.identity.expires == max(expiries[n]))

    class Daily(WrappedLink):
        def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
            days[0] = max(days[0], header.version)
            if header.version in (40, 80) and self._inner is links["s1"]:
                renew()
            return self._inner.upload(header, payload)

    renew()
    with Wires(authority.directory) as wires:

        def wrap(name: str, link: Link) -> Link:
            links[name] = wires.wrap(name, link)  # type: ignore[assignment]
            return Daily(links[name])  # type: ignore[return-value]

        ran = run_tiny(tmp_path / "run", config, wrap=wrap)
    assert ran.hashes == expected and days == [99]
    totals = ran.result.totals
    assert (totals.contributions, totals.rejected, totals.rejoins) == (200, 0, 0)
    for found in expiries.values():
        assert [(day - now()).days for day in sorted(found)] == [44, 84, 124]


@pytest.mark.slow
def test_a_federation_moves_to_a_second_authority_while_it_trains(
    authority: pki.Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/deploy.md has it: trust both, move everybody, trust the second alone."""
    monkeypatch.setattr(server, "PEERS_S", 0.2)
    folder, bench = authority.directory, Bench(tmp_path)
    second = pki.Authority.make(tmp_path / "second", None)
    payload, files = payload_of(1.0, bench.layout), {"s1": ["ca.crt"]}
    files["coordinator"] = ["ca.crt", "crl.pem"]

    def trust(*authorities: Path) -> None:
        for name, file in ((name, file) for name, found in files.items() for file in found):
            whole = b"".join((one / "ca" / file).read_bytes() for one in authorities)
            replace_bytes(folder / name / file, whole)

    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        link.join(bench.hello("s1"))
        await_control(bench, link, "s1")
        trust(folder, second.directory)
        shutil.copytree(folder / "s1", tmp_path / "old")
        for name in files:
            second.sign(folder / name / "identity.csr")
            signed = (second.directory / name / "identity.crt").read_bytes()
            replace_bytes(folder / name / "identity.crt", signed)
        issuer = second._issuer.certificate.subject
        eventually(lambda: {found.issuer for _, found in plane._calls.values()} == {issuer})
        with dialling(plane.port, tmp_path / "old", patience_s=3.0) as old:
            old.join(bench.hello("s1"))  # who has not moved yet
        trust(second.directory)
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
        assert link.signals.empty()
        with dialling(plane.port, tmp_path / "old", patience_s=0.5) as old:
            with pytest.raises(LinkLost, match="Socket closed"):
                old.join(bench.hello("s1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("why", "says"),
    [
        ("revoked", "certificate of s1 is revoked; delete identity.key"),
        ("expired", "our certificate .*it expired on 20"),
    ],
)
def test_a_site_whose_certificate_ends_is_told_and_can_do_nothing_more(
    authority: pki.Authority, renew_for: Callable[..., None], tmp_path: Path, why: str, says: str
) -> None:
    folder, bench = authority.directory, Bench(tmp_path)
    payload, hello = payload_of(1.0, bench.layout), bench.hello("s1")
    hello.certificate = b"mine"
    if why == "expired":
        renew_for("s1", 2.0)
    identity = Identity.load(folder / "s1")
    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        link.join(hello)
        assert bench.events[0] == ("join", "s1", "s1 joined")
        assert bench.details[0] == {"certificate": identity.cert_pem.decode()}
        await_control(bench, link, "s1")
        if why == "revoked":
            authority.revoke("s1")
        signal = link.signals.get(timeout=ENDS_S)  # its open stream ends
        assert signal.kind == wire.CoordinatorSignal.GONE and why in signal.text
        began = time.monotonic()
        with pytest.raises(IdentityError, match=says):
            link.upload(header_of(payload), payload)
        with closing(GrpcLink(link._address, identity, LINK)) as late:
            with pytest.raises(IdentityError, match=says):
                late.join(bench.hello("s1", "again"))
        assert time.monotonic() - began < ENDS_S
    assert bench.hub.shut_out["s1"].startswith("the certificate of s1 ")
    assert bench.contribution("s1") is None


@pytest.mark.slow
def test_an_identity_that_is_renewed_while_the_coordinator_is_away_is_taken(
    authority: pki.Authority,
    renew_for: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, bench = authority.directory, Bench(tmp_path)
    payload = payload_of(1.0, bench.layout)
    renew_for("s1", 4.0)
    old = Identity.load(folder / "s1")
    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        link.join(bench.hello("s1"))
        await_control(bench, link, "s1")
        monkeypatch.setattr(client, "HEARTBEAT_S", 60.0)  # none goes out from here on
        port = plane.port
        plane.stop(0.0)
        time.sleep(0.3)  # the stream that stood has looked for the last time
        uploading = in_thread(lambda: link.upload(header_of(payload), payload))
        renew_for("s1", 60.0)
        time.sleep((old.expires - now()).total_seconds() + 0.2)
        assert link._renewable.identity != old, "its thread has looked"
        with serving(bench.hub, folder, LinkConfig(listen=f"127.0.0.1:{port}")):
            assert uploading().status == wire.Receipt.ACCEPTED


def test_a_coordinator_whose_own_certificate_has_expired_is_told_on_both_sides(
    authority: pki.Authority, renew_for: Callable[..., None], tmp_path: Path
) -> None:
    folder, bench = authority.directory, Bench(tmp_path)
    renew_for("coordinator", 1.0)
    says = "its certificate is not accepted here: certificate has expired; whoever runs the coordin"
    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        eventually(lambda: bench.events)
        with pytest.raises(IdentityError, match=says):
            link.join(bench.hello("s1"))
        kind, site, text = bench.events[0]
        assert (kind, site) == ("rejected", None)
        assert text.startswith("the coordinator's own certificate expired on 20")
        assert bench.hub.rejected == 1, "told once, however long it lasts"
        renew_for("coordinator", 60.0)
        link.join(bench.hello("s1"))


@pytest.mark.slow
def test_a_list_that_lapsed_at_the_coordinator_keeps_sites_waiting_for_another(
    authority: pki.Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server, "PEERS_S", 0.2)
    folder, bench = authority.directory, Bench(tmp_path)
    crl = folder / "coordinator" / "crl.pem"
    good, payload = crl.read_bytes(), payload_of(1.0, bench.layout)
    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        link.join(bench.hello("s1"))
        await_control(bench, link, "s1")
        let_lapse(authority)
        eventually(lambda: not plane._calls)  # nobody is served
        with dialling(plane.port, folder / "s1", patience_s=0.5) as hasty:
            says = "for 0.5 s .*whose revocation list has lapsed here; whoever runs"
            with pytest.raises(LinkLost, match=says):
                hasty.join(bench.hello("s1"))
        uploading = in_thread(lambda: link.upload(header_of(payload), payload))
        time.sleep(0.2)
        crl.write_bytes(good)
        assert uploading().status == wire.Receipt.ACCEPTED
        assert link.signals.empty()
    assert not bench.hub.shut_out and bench.rounds.setbacks["s1"] == 0
    assert caplog.text.count(f"{crl} has no valid list of CN=fedwan authority") == 1


def test_an_identity_that_was_renewed_after_it_was_read_is_noticed_at_the_first_look(
    authority: pki.Authority,
) -> None:
    """A site reads it before it prepares its data, which may take hours."""
    identity = Identity.load(authority.directory / "s1")
    assert not Renewable(identity).renew()
    authority.renew("s1")
    late = Renewable(identity)
    assert late.renew() and late.identity != identity
    assert not late.renew()


def test_an_identity_that_is_about_to_expire_is_told_once_a_day(
    authority: pki.Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.renew("s1", days=90)
    clock = [now()]
    monkeypatch.setattr(admission, "now", lambda: clock[0])
    held = Renewable(Identity.load(authority.directory / "s1"))
    for days, told in ((0, 0), (75, 0), (2, 1), (0.5, 1), (1, 2)):
        clock[0] += timedelta(days=days)
        for _ in range(3):
            assert not held.renew()
        assert caplog.text.count("renewed at the authority: fedwan pki renew s1") == told
    authority.renew("s1", days=200)
    clock[0] += timedelta(days=2)
    assert held.renew() and not held.renew()
    assert caplog.text.count("fedwan pki renew s1") == told
