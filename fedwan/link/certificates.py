"""How fedwan's certificates look: X.509 built in memory, after RFC 5280. Files are `pki`'s."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedwan.errors import IdentityError

__all__ = [
    "Role",
    "alternative_names",
    "common_name",
    "new_key",
    "now",
    "private_pem",
    "public_pem",
    "sign_authority",
    "sign_crl",
    "sign_identity",
    "usage_of",
]

Role = Literal["site", "coordinator"]
"""Who bears an identity: sites open connections, the coordinator accepts them."""

_CLOCK_SKEW = timedelta(minutes=5)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")


def now() -> datetime:
    """The present, with its time zone."""
    return datetime.now(UTC)


def usage_of(role: Role) -> x509.ObjectIdentifier:
    """The one extended key usage that a role's certificate holds."""
    if role == "site":
        return ExtendedKeyUsageOID.CLIENT_AUTH
    return ExtendedKeyUsageOID.SERVER_AUTH


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh EC P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A key as unencrypted PKCS 8: services start unattended, so its file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_pem(item: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    """A certificate or revocation list as PEM."""
    return item.public_bytes(serialization.Encoding.PEM)


def common_name(certificate: x509.Certificate) -> str:
    """The common name of a certificate's subject; empty if it has none."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def alternative_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """The names that a coordinator answers to: `hosts`, `localhost` and `127.0.0.1`.

    Raises:
        IdentityError: a host is neither a DNS name nor an IP address.
    """
    names: dict[str, x509.GeneralName] = {}
    for host in (*hosts, "localhost", "127.0.0.1"):
        try:
            names[host] = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            if not _HOST.fullmatch(host):
                raise IdentityError(
                    f"host {host!r} is neither a DNS name nor an IP address; "
                    "give it without scheme and port, as sites dial it"
                ) from None
            names[host] = x509.DNSName(host)
    return list(names.values())


def sign_authority(key: ec.EllipticCurvePrivateKey, not_after: datetime) -> x509.Certificate:
    """A self-signed authority that may sign identities and revocation lists, and nothing below."""
    # The name must differ between authorities: a verifier picks the issuer by name.
    subject = _name(f"fedwan authority {x509.random_serial_number() >> 128:08x}")
    builder = _begin(subject, subject, key.public_key(), key.public_key(), not_after)
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def sign_identity(
    name: str,
    role: Role,
    names: Sequence[x509.GeneralName],
    key: ec.EllipticCurvePublicKey,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    not_after: datetime,
) -> x509.Certificate:
    """The certificate of a site or of the coordinator.

    Args:
        name: the common name.
        role: decides the extended key usage.
        names: the subject's alternative names.
        key: the subject's public key.
        authority: the issuer's certificate and private key.
        not_after: when it expires.
    """
    ca, ca_key = authority
    builder = _begin(_name(name), ca.subject, key, ca_key.public_key(), not_after)
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage_of(role)]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def sign_crl(
    revoked: dict[int, datetime],
    number: int,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
) -> x509.CertificateRevocationList:
    """A revocation list.

    Args:
        revoked: serial numbers, and when each was revoked.
        number: of this list; higher than the last one's.
        authority: the issuer's certificate and private key.
    """
    ca, ca_key = authority
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now() - _CLOCK_SKEW)
        # As long as the authority lasts: a list that lapsed would shut every site out.
        .next_update(ca.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_authority_key(ca_key.public_key()), critical=False)
    )
    for serial, when in sorted(revoked.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(ca_key, hashes.SHA256())


def _begin(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    not_after: datetime,
) -> x509.CertificateBuilder:
    """What every certificate has: names, dates, a random serial, and both key identifiers."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _CLOCK_SKEW)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(_authority_key(issuer_key), critical=False)
    )


def _authority_key(key: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
