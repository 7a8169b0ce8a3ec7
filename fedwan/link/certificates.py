"""How a federation's keys, requests, certificates and revocation lists look (RFC 5280, RFC 2986).

Keys are EC P-256. A site's certificate may open connections (clientAuth) and the coordinator's may
accept them (serverAuth), never both, so that a site's stolen key cannot impersonate the
coordinator. An authority signs certificates and revocation lists, and nothing else.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import NameOID

from fedwan.errors import IdentityError
from fedwan.link.tls import USAGE, common_name, now
from fedwan.names import why_unsafe

COORDINATOR = "coordinator"
PEM = serialization.Encoding.PEM
CA_DAYS = 1826
"""Days that an authority lasts: five years."""
_CLOCK_SKEW = timedelta(minutes=5)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_UNUSED = (
    "content_commitment key_encipherment data_encipherment key_agreement "
    "encipher_only decipher_only"
).split()


UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises at what others have made."""


class Issuer(NamedTuple):
    """An authority's certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def new_key() -> ec.EllipticCurvePrivateKey:
    """A private key."""
    return ec.generate_private_key(ec.SECP256R1())


def new_issuer() -> Issuer:
    """An authority; its name is its own, since whoever verifies picks the issuer by name."""
    key = new_key()
    subject = name_of(f"fedwan authority {x509.random_serial_number() >> 128:08x}")
    until = now() + timedelta(days=CA_DAYS)
    builder = _builder(subject, subject, key.public_key(), key, until, is_ca=True)
    return Issuer(builder.sign(key, hashes.SHA256()), key)


def parse_request(data: bytes, what: str) -> x509.CertificateSigningRequest:
    """A request that may be signed; `what` it is, for the `IdentityError` if it may not."""
    fault = ""
    try:
        request = x509.load_pem_x509_csr(data)
        key, name = request.public_key(), common_name(request)
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
            fault = "its key is no EC P-256 key"
        elif not request.is_signature_valid:
            fault = "it is not signed by its own key"
        hosts_of(request)
    except UNREADABLE:
        fault = "it is damaged, or of another form than PEM"
    if fault:
        raise IdentityError(
            f"{what} is no certificate request that can be signed: {fault}; make one: "
            "fedwan pki request NAME"
        )
    check_name(name)
    return request


def hosts_of(certified: x509.CertificateSigningRequest | x509.Certificate) -> list[str]:
    """The hosts that a request or certificate names."""
    try:
        names = certified.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def sign(
    issuer: Issuer, name: str, key: ec.EllipticCurvePublicKey, hosts: Sequence[str], days: int
) -> x509.Certificate:
    """A party's certificate, which does not outlast its authority."""
    until = min(now() + timedelta(days=days), issuer.certificate.not_valid_after_utc)
    role = USAGE["coordinator" if name == COORDINATOR else "site"]
    names = alternative_names(name, hosts)
    return (
        _builder(name_of(name), issuer.certificate.subject, key, issuer.key, until, is_ca=False)
        .add_extension(x509.ExtendedKeyUsage([role]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer.key, hashes.SHA256())
    )


def sign_revocations(issuer: Issuer, revoked: Mapping[int, datetime], number: int) -> bytes:
    """A revocation list, PEM, of serial numbers and when each was revoked."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer.certificate.subject)
        .last_update(now() - _CLOCK_SKEW)
        # As long as the authority lasts: a list that lapsed would shut every site out.
        .next_update(issuer.certificate.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_key_identifier(issuer.key), critical=False)
    )
    for serial, when in sorted(revoked.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(issuer.key, hashes.SHA256()).public_bytes(PEM)


def list_number(crl: x509.CertificateRevocationList) -> int:
    """The number of a list that `sign_revocations` has made."""
    return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def fingerprint(key: PublicKeyTypes) -> str:
    """What two people compare, to see that a key is the one that was sent: SHA-256 of it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    digest = hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()[:32]
    return " ".join(digest[at : at + 4] for at in range(0, len(digest), 4))


def check_name(name: str) -> None:
    """Refuse what is neither a site's name nor the coordinator's."""
    if name != COORDINATOR and (reason := why_unsafe(name)):
        raise IdentityError(f"name {name!r} {reason}; choose another")


def alternative_names(name: str, hosts: Sequence[str]) -> list[x509.GeneralName]:
    """A site answers to its name; a coordinator to its hosts, `localhost` and `127.0.0.1`."""
    if name != COORDINATOR:
        return [x509.DNSName(name)]
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


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    not_after: datetime,
    is_ca: bool,
) -> x509.CertificateBuilder:
    """What every certificate has."""
    unused = dict.fromkeys(_UNUSED, False)
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **unused
    )
    path_length = 0 if is_ca else None
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        # Grows with time, for dates tell seconds alone, and nobody can guess it.
        .serial_number(time.time_ns() << 80 | secrets.randbits(80))
        .not_valid_before(now() - _CLOCK_SKEW)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(_key_identifier(issuer_key), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=path_length), critical=True)
        .add_extension(usage, critical=True)
    )


def _key_identifier(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def name_of(common_name: str) -> x509.Name:
    """A subject."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
