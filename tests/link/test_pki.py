"""The authority's folder: what it holds, who may read it, and what it refuses."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedwan.errors import IdentityError
from fedwan.link import pki
from fedwan.link.tls import now


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    directory = tmp_path / "pki"
    pki.init(directory, ["coordinator.example.com", "192.0.2.7"])
    return directory


def certificate_of(folder: Path, name: str = "identity.crt") -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / name).read_bytes())


def revoked_serials(path: Path) -> set[int]:
    return {entry.serial_number for entry in x509.load_pem_x509_crl(path.read_bytes())}


def test_private_keys_are_readable_by_their_owner_alone(authority: Path) -> None:
    pki.issue(authority, "s1")
    for folder, name in [("ca", "ca.key"), ("coordinator", "identity.key"), ("s1", "identity.key")]:
        assert stat.S_IMODE((authority / folder / name).stat().st_mode) == 0o600
        assert stat.S_IMODE((authority / folder).stat().st_mode) == 0o700


def test_the_coordinators_certificate_names_its_hosts_and_serves_only(authority: Path) -> None:
    extensions = certificate_of(authority / "coordinator").extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dns = names.get_values_for_type(x509.DNSName)
    addresses = {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}
    assert set(dns) == {"coordinator.example.com", "localhost"}
    assert addresses == {"192.0.2.7", "127.0.0.1"}
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_a_sites_certificate_bears_its_name_and_dials_only(authority: Path) -> None:
    pki.issue(authority, "paris-2", days=30)
    certificate = certificate_of(authority / "paris-2")
    assert certificate.subject.rfc4514_string() == "CN=paris-2"
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not basic.ca
    assert timedelta(29) < certificate.not_valid_after_utc - now() <= timedelta(30)


def test_certificates_chain_to_the_authority_by_key_identifier(authority: Path) -> None:
    ca = certificate_of(authority / "ca", "ca.crt")
    leaf = certificate_of(authority / "coordinator")
    leaf.verify_directly_issued_by(ca)
    subject_key = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    authority_key = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert authority_key.key_identifier == subject_key.key_identifier
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value == x509.BasicConstraints(True, 0)
    assert leaf.serial_number != ca.serial_number


def test_an_authority_is_never_overwritten(authority: Path) -> None:
    before = (authority / "ca" / "ca.key").read_bytes()
    with pytest.raises(IdentityError, match="holds an authority already"):
        pki.init(authority, [])
    assert (authority / "ca" / "ca.key").read_bytes() == before


def test_unsafe_names_hosts_and_lifetimes_are_refused_before_anything_is_made(
    authority: Path, tmp_path: Path
) -> None:
    for name in ("", "../ca", "ca", "coordinator", "S1", "a" * 64, "a.b", "-a"):
        with pytest.raises(IdentityError, match="choose another"):
            pki.issue(authority, name)
    for days in (0, -1, 100_000):
        with pytest.raises(IdentityError, match="choose 1 to"):
            pki.issue(authority, "s1", days)
    assert {path.name for path in authority.iterdir()} == {"ca", "coordinator"}
    for host in ("https://a.b", "a.b:443", "", "a b", "-a"):
        with pytest.raises(IdentityError, match="neither a DNS name nor an IP address"):
            pki.init(tmp_path / "another", [host])
    assert not (tmp_path / "another").exists()


def test_a_name_is_issued_again_only_after_it_was_revoked(authority: Path) -> None:
    pki.issue(authority, "s1")
    first = certificate_of(authority / "s1")
    with pytest.raises(IdentityError, match="revoke it first"):
        pki.issue(authority, "s1")
    assert certificate_of(authority / "s1") == first
    pki.revoke(authority, "s1")
    pki.issue(authority, "s1")
    assert certificate_of(authority / "s1") != first
    assert first.serial_number in revoked_serials(authority / "ca" / "crl.pem")


def test_revoking_signs_a_longer_list_for_the_coordinator(authority: Path) -> None:
    for name in ("s1", "s2"):
        pki.issue(authority, name)
        pki.revoke(authority, name)
    expected = {certificate_of(authority / name).serial_number for name in ("s1", "s2")}
    for folder in ("ca", "coordinator"):
        assert revoked_serials(authority / folder / "crl.pem") == expected
    crl = x509.load_pem_x509_crl((authority / "ca" / "crl.pem").read_bytes())
    assert crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 3
    ca = certificate_of(authority / "ca", "ca.crt")
    assert crl.is_signature_valid(ca.public_key())
    # OpenSSL turns every peer away once a list is past its date.
    assert crl.next_update_utc == ca.not_valid_after_utc


def test_renewing_keeps_the_authority_and_takes_new_hosts(authority: Path) -> None:
    before = certificate_of(authority / "ca", "ca.crt")
    pki.renew(authority, ["new.example.com"], days=10)
    assert certificate_of(authority / "ca", "ca.crt") == before
    names = certificate_of(authority / "coordinator").extensions
    dns = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "new.example.com" in dns.get_values_for_type(x509.DNSName)


def test_issuing_without_an_authority_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="fedwan pki init"):
        pki.issue(tmp_path, "s1")
    pki.init(tmp_path, [])
    with pytest.raises(IdentityError, match="'s9' was never issued"):
        pki.revoke(tmp_path, "s9")
    (tmp_path / "ca" / "ca.key").write_text("nonsense")
    with pytest.raises(IdentityError, match="cannot be read"):
        pki.issue(tmp_path, "s1")
