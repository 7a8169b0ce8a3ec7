"""The authority's folder: what it holds, who may read it, and what it refuses."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedwan.errors import IdentityError
from fedwan.link import certificates, pki
from fedwan.link.admission import Admission, read_lists
from fedwan.link.pki import Authority
from fedwan.link.tls import Identity, now

PASSPHRASE = b"correct horse battery"
HOSTS = ["coordinator.example.com", "192.0.2.7"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Of its own folder, opened; coordinator and sites have theirs, as on machines of their own."""
    Authority.make(tmp_path / "pki", PASSPHRASE)
    return Authority.open(tmp_path / "pki", PASSPHRASE)


def admit(authority: Authority, name: str, days: int = 90) -> Path:
    """A party's folder, elsewhere: the request goes to the authority and the answer comes back."""
    folder = authority.directory.parent / f"at-{name}"
    pki.request(folder, name, HOSTS if name == "coordinator" else ())
    authority.sign(folder / "identity.csr", days)
    bring(authority, name)
    return folder


def bring(authority: Authority, name: str) -> None:
    for file in (authority.directory / name).iterdir():
        (authority.directory.parent / f"at-{name}" / file.name).write_bytes(file.read_bytes())


def certificate_of(folder: Path, name: str = "identity.crt") -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / name).read_bytes())


def revoked_serials(path: Path) -> set[int]:
    return {entry.serial_number for crl in read_lists(path.read_bytes()) for entry in crl}


def test_keys_are_private_stay_where_they_were_made_and_the_authority_s_is_encrypted(
    authority: Authority, tmp_path: Path
) -> None:
    site = admit(authority, "s1")
    assert Identity.load(site).name == "s1"
    (path,) = (authority.directory / "ca").glob("*.key")
    for file, mode in ((site, 0o700), (site / "identity.key", 0o600), (path, 0o600)):
        assert stat.S_IMODE(file.stat().st_mode) == mode
    signed = {file.name for file in (authority.directory / "s1").iterdir()}
    assert signed == {"ca.crt", "identity.crt"}
    before = (site / "identity.key").read_bytes()
    pki.request(site, "s1")
    assert (site / "identity.key").read_bytes() == before
    assert b"ENCRYPTED" in path.read_bytes()
    with pytest.raises(IdentityError, match="cannot be read: it has another passphrase or is dam"):
        Authority.open(authority.directory, b"another one")
    with pytest.raises(IdentityError, match="has 5 bytes; take at least 8"):
        Authority.make(tmp_path / "short", b"short")
    assert not (tmp_path / "short" / "ca").exists()
    pki.federation(tmp_path / "here", ["127.0.0.1"], ["s1"])  # whose authority's is not kept
    assert not list((tmp_path / "here" / "ca").glob("*.key"))


def test_the_coordinators_certificate_names_its_hosts_and_serves_only(authority: Authority) -> None:
    certificate = certificate_of(admit(authority, "coordinator"))
    extensions = certificate.extensions
    assert certificates.hosts_of(certificate) == [*HOSTS, "localhost", "127.0.0.1"]
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    ca = certificate_of(authority.directory / "ca", "ca.crt")
    certificate.verify_directly_issued_by(ca)
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value == x509.BasicConstraints(True, 0)


def test_a_request_is_signed_for_what_its_name_may_be_and_nothing_else(
    authority: Authority, tmp_path: Path
) -> None:
    """A site that asks for the coordinator's hosts, to serve and to be an authority."""
    key = certificates.new_key()
    names = x509.SubjectAlternativeName([x509.DNSName("coordinator.example.com")])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "s1")]))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, certificates.hashes.SHA256())
    )
    (tmp_path / "greedy.csr").write_bytes(request.public_bytes(certificates.PEM))
    authority.sign(tmp_path / "greedy.csr", days=30)
    certificate = certificate_of(authority.directory / "s1")
    assert timedelta(29) < certificate.not_valid_after_utc - now() <= timedelta(30)
    extensions = certificate.extensions
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName("s1")]


def csr(
    name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, names: bytes = b""
) -> bytes:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    if names:
        extension = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, names)
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, certificates.hashes.SHA256()).public_bytes(certificates.PEM)


def test_what_is_no_good_request_is_refused_in_one_line(
    authority: Authority, tmp_path: Path
) -> None:
    good = csr("s1", certificates.new_key())
    lines = good.splitlines()
    der, point = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    own, other = (
        x509.load_pem_x509_csr(data).public_key().public_bytes(der, point)
        for data in (good, csr("s1", certificates.new_key()))
    )
    forged = x509.load_pem_x509_csr(good).public_bytes(der).replace(own, other)
    forged = x509.load_der_x509_csr(forged).public_bytes(certificates.PEM)
    weak = rsa.generate_private_key(65537, 2048)
    for data, says in [
        (b"nonsense", "can be signed: it is damaged, or of another form than PEM; make one"),
        (good[:200], "can be signed: it is damaged"),
        (csr("s1", certificates.new_key(), b"0\3\1\2"), "can be signed: it is damaged"),
        (csr("s1", certificates.new_key(), b"0\4\243\0020\0"), "can be signed: it is damaged"),
        (b"\n".join([*lines[:-2], lines[-2][:-8] + b"AAAAAAA=", lines[-1]]), "request"),
        (forged, "is not signed by its own key"),
        (csr("s1", weak), "no EC P-256 key"),
        (csr("../ca", certificates.new_key()), "is no DNS label"),
        (csr("ca", certificates.new_key()), "is reserved"),
    ]:
        (tmp_path / "a.csr").write_bytes(data)
        with pytest.raises(IdentityError, match=says) as caught:
            authority.sign(tmp_path / "a.csr")
        assert "\n" not in str(caught.value)
    with pytest.raises(IdentityError, match="cannot be read"):
        authority.sign(tmp_path / "none.csr")
    assert not list((authority.directory / "ca" / "issued").iterdir())
    pki.request(tmp_path / "identity", "s1")
    with pytest.raises(IdentityError, match="is s1's; give 's9' a folder of its own"):
        pki.request(tmp_path / "identity", "s9")


def test_unsafe_names_hosts_and_lifetimes_are_refused_before_anything_is_made(
    authority: Authority, tmp_path: Path
) -> None:
    for name in ("", "../ca", "ca", "S1", "a" * 64, "a\n", "a.b", "-a"):
        with pytest.raises(IdentityError, match="choose another"):
            pki.request(tmp_path / "x", name)
    with pytest.raises(IdentityError, match="site 's1' is dialled by nobody"):
        pki.request(tmp_path / "x", "s1", ["a.example"])
    with pytest.raises(IdentityError, match="site 's1' is dialled by nobody"):
        authority.renew("s1", ["a.example"])
    for host in ("https://a.b", "a.b:443", "", "a b", "-a"):
        with pytest.raises(IdentityError, match="neither a DNS name nor an IP address"):
            pki.request(tmp_path / "x", "coordinator", [host])
    assert not (tmp_path / "x").exists()
    pki.request(tmp_path / "x", "s1")
    for days in (0, -1, 100_000):
        with pytest.raises(IdentityError, match="choose 1 to"):
            authority.sign(tmp_path / "x" / "identity.csr", days)
    assert {path.name for path in authority.directory.iterdir()} == {"ca"}


def test_another_key_for_a_name_is_signed_only_after_the_first_was_revoked(
    authority: Authority, tmp_path: Path
) -> None:
    first = certificate_of(admit(authority, "s1"))
    pki.request(tmp_path / "other", "s1")
    other = tmp_path / "other" / "identity.csr"
    with pytest.raises(IdentityError, match="has an identity of another key until .* revoke it"):
        authority.sign(other)
    assert certificate_of(authority.directory / "s1") == first
    authority.revoke("s1")
    with pytest.raises(IdentityError, match="the key of 's1' .* was revoked"):
        authority.sign(tmp_path / "at-s1" / "identity.csr")
    authority.sign(other)
    assert certificate_of(authority.directory / "s1").public_key() != first.public_key()
    assert first.serial_number in revoked_serials(authority.directory / "ca" / "crl.pem")


def test_who_is_revoked_by_several_commands_at_once_is_on_the_list_also_on_the_coordinator_s(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(authority, "coordinator")
    folders, sign = [admit(authority, f"s{n}") for n in range(4)], certificates.sign_revocations

    def slowly(*args: Any) -> bytes:
        time.sleep(0.05)
        return sign(*args)

    monkeypatch.setattr(certificates, "sign_revocations", slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(authority.revoke, [f"s{n}" for n in range(4)]))
    expected = {certificate_of(folder).serial_number for folder in folders}
    for folder in ("ca", "coordinator"):
        assert revoked_serials(authority.directory / folder / "crl.pem") == expected


def another(folder: Path) -> tuple[Authority, list[x509.Certificate]]:
    """An authority with two sites, of which the first is revoked."""
    Authority.make(folder / "pki", PASSPHRASE)
    authority = Authority.open(folder / "pki", PASSPHRASE)
    sites = [certificate_of(admit(authority, site)) for site in ("s1", "s2")]
    authority.revoke("s1")
    return authority, sites


@pytest.mark.parametrize("name", ["fedwan authority", None])
def test_what_other_authorities_have_in_a_party_s_folder_holds_for_their_own_and_stays(
    tmp_path: Path, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_of = certificates.name_of
    if name:  # of both
        monkeypatch.setattr(
            certificates, "name_of", lambda text: name_of(name if text.startswith(name) else text)
        )
    authority, sites = another(tmp_path / "ours")
    other, others = another(tmp_path / "theirs")
    admit(authority, "coordinator")
    folder = authority.directory / "coordinator"
    for file in ("ca.crt", "crl.pem"):
        parts = [one.directory / "ca" / file for one in (other, authority)]
        (folder / file).write_bytes(b"".join(part.read_bytes() for part in parts))
        if file == "ca.crt":
            shutil.copy(folder / file, authority.directory / "s2")
    assert (authority.certificate.subject == other.certificate.subject) == bool(name)
    admission = Admission(folder)
    assert [admission.objection(site) for site in others + sites] == 2 * ["is revoked", ""]
    for change in (
        lambda: authority.renew("coordinator"),
        lambda: authority.sign(tmp_path / "ours" / "at-coordinator" / "identity.csr"),
        lambda: authority.renew("s2"),
        lambda: authority.revoke("s2"),
    ):
        change()
        admission = Admission(folder)
        assert [admission.objection(site) for site in others] == ["is revoked", ""]
        assert admission.objection(sites[0]) == "is revoked"
        assert len(read_lists((folder / "crl.pem").read_bytes())) == 2
        for party in ("coordinator", "s2"):
            assert authority.others(party) == [other.certificate]
            authorities = (authority.directory / party / "ca.crt").read_bytes()
            assert len(x509.load_pem_x509_certificates(authorities)) == 2
    assert admission.objection(sites[1]) == "is revoked"


def test_a_damaged_file_of_the_coordinator_s_keeps_nobody_from_being_revoked(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    for site in ("coordinator", "s1", "s2"):
        admit(authority, site)
    folder = authority.directory / "coordinator"
    path, certificates_ = folder / "crl.pem", authority.directory / "ca" / "issued"
    path.write_text("half a fi")
    authority.revoke("s1")
    assert caplog.text.count(f"{path} is damaged: put back what it had of other auth") == 1
    crl = path.read_bytes()
    body = crl.splitlines()
    body[-2] = body[-2][:-8] + b"AAAAAAA="
    path.write_bytes(b"\n".join(body))
    authority.revoke("s2")
    for file in certificates_.glob("s*.crt"):
        site = x509.load_pem_x509_certificate(file.read_bytes())
        assert Admission(folder).objection(site) == "is revoked"


def test_two_copies_of_an_authority_keep_what_either_has_revoked_at_the_coordinator(
    authority: Authority, tmp_path: Path
) -> None:
    admit(authority, "coordinator")
    sites = [certificate_of(admit(authority, f"s{n}")) for n in range(3)]
    shutil.copytree(authority.directory / "ca", tmp_path / "copy")
    numbers = [1]
    for n, site in enumerate(sites):
        if n == 1:  # the copy in its place
            shutil.rmtree(authority.directory / "ca")
            (tmp_path / "copy").rename(authority.directory / "ca")
        authority.revoke(f"s{n}")
        for folder in ("ca", "coordinator"):
            path = authority.directory / folder / "crl.pem"
            assert revoked_serials(path) == {site.serial_number for site in sites[: n + 1]}
        (crl,) = read_lists(path.read_bytes())
        numbers.append(certificates.list_number(crl))
    assert numbers == sorted(set(numbers))


def test_who_has_a_damaged_certificate_is_revoked_by_its_file_s_name_or_it_is_told(
    authority: Authority,
) -> None:
    coordinator = admit(authority, "coordinator")
    site = admit(authority, "s1")
    first = certificate_of(site)
    authority.renew("s1")
    bring(authority, "s1")
    issued, path = authority.directory / "ca" / "issued", authority.directory / "ca" / "crl.pem"
    damaged = issued / f"s1.{first.serial_number:x}.crt"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:99])
    with pytest.raises(IdentityError, match=f"{damaged} cannot be read: it is damaged; .*revoke s"):
        authority.renew("s1")
    body, at = whole.splitlines(), b"\xa0\x03\x02\x01"
    der = base64.b64decode(b"".join(body[1:-1])).replace(at + b"\x02", at + b"\x07")
    damaged.write_bytes(b"\n".join([body[0], base64.encodebytes(der).strip(), body[-1], b""]))
    with pytest.raises(IdentityError, match="cannot be read: it is damaged"):  # a version of none
        authority.renew("s1")
    damaged.write_bytes(whole[:99])
    for name, serials in [("s1.old.crt", 1), ("s1.0.crt", 1), (f"s1.{'f' * 40}.crt", 1)]:
        nameless = damaged.rename(issued / name)
        with pytest.raises(IdentityError, match=f"is revoked but for {nameless}, which is damaged"):
            authority.revoke("s1")
        assert len(revoked_serials(path)) == serials
        nameless.rename(damaged)
    authority.revoke("s1")
    assert revoked_serials(path) == {c.serial_number for c in (first, certificate_of(site))}
    (coordinator / "crl.pem").write_bytes(path.read_bytes())
    assert Admission(coordinator).objection(first) == "is revoked"


@pytest.mark.parametrize("is_ours", [False, True])
def test_who_may_not_read_the_authority_is_told_who_may(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    path = authority.directory / "ca" / "ca.crt"

    def deny(self: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", deny)
    says = f"let yourself: chmod -R u.rwX {path.parent}$"
    if not is_ours:
        says = f"run this as its owner: sudo -u {path.owner()}, or"
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(IdentityError, match=f"{path} may not be read or written; {says}"):
        Authority.open(authority.directory, PASSPHRASE)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    says = says if is_ours else f"sudo -u #{path.stat().st_uid},"
    with pytest.raises(IdentityError, match=says):
        Authority.open(authority.directory, PASSPHRASE)


def test_a_renewed_identity_has_the_same_key_and_the_old_one_stays_valid(
    authority: Authority,
) -> None:
    coordinator, site = admit(authority, "coordinator"), admit(authority, "s1")
    before = certificate_of(site)
    authority.renew("s1", days=10)
    bring(authority, "s1")
    after = certificate_of(site)
    assert after.serial_number != before.serial_number
    assert after.public_key() == before.public_key()
    admission = Admission(coordinator)
    assert not admission.objection(before) and not admission.objection(after)
    authority.renew("coordinator", ["new.example.com"])
    hosts = certificates.hosts_of(certificate_of(authority.directory / "coordinator"))
    assert hosts == ["new.example.com", "localhost", "127.0.0.1"]
    authority.renew("coordinator")
    assert certificates.hosts_of(certificate_of(authority.directory / "coordinator")) == hosts
    authority.revoke("s1")
    for name in ("s1", "s9"):
        with pytest.raises(IdentityError, match="has no identity of .* that is not revoked"):
            authority.renew(name)


@pytest.mark.parametrize("apart", [timedelta(days=1), timedelta()])
def test_the_newest_identity_is_the_last_one_of_a_second_too_wherever_files_were_copied(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, apart: timedelta
) -> None:
    moment = certificates.now() - 9 * apart
    monkeypatch.setattr(certificates, "now", lambda: moment)
    admit(authority, "coordinator")
    for n in range(9):
        moment += apart
        authority.renew("coordinator", [f"new{n}.example.com"])
    issued = authority.directory / "ca" / "issued"
    for path in issued.iterdir():
        os.utime(path, (0, 0))
    hosts = certificates.hosts_of(authority.renew("coordinator"))
    assert hosts == ["new8.example.com", "localhost", "127.0.0.1"]


def test_without_an_authority_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="fedwan pki init"):
        Authority.open(tmp_path, PASSPHRASE)
    authority = Authority.make(tmp_path, PASSPHRASE)
    with pytest.raises(IdentityError, match="'s9' was never signed"):
        authority.revoke("s9")
    (path,) = (tmp_path / "ca").glob("*.key")
    path.write_text("nonsense")
    with pytest.raises(IdentityError, match="cannot be read: it has another passphrase or is dam"):
        Authority.open(tmp_path, PASSPHRASE)
    path.unlink()
    with pytest.raises(IdentityError, match=f"{path} is missing; restore it from a backup"):
        Authority.open(tmp_path, PASSPHRASE)
    (tmp_path / "ca" / "ca.crt").write_text("nonsense")
    with pytest.raises(IdentityError, match="cannot be read: it is damaged; restore it from a bac"):
        Authority.open(tmp_path, PASSPHRASE)
