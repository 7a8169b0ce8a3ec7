"""The run's certificate authority: a folder that issues, and revokes, identities (RFC 5280).

    DIR/ca            ca.crt  ca.key  crl.pem  issued/      stays with whoever runs the federation
    DIR/coordinator   ca.crt  identity.crt  identity.key  crl.pem
    DIR/SITE          ca.crt  identity.crt  identity.key    goes to that site

Keys are EC P-256 and are created with mode 0600, unencrypted, since services start unattended. A
site's identity may open connections (clientAuth) and the coordinator's may accept them
(serverAuth), never both, so that a site's stolen key cannot impersonate the coordinator.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedwan.errors import IdentityError
from fedwan.link.tls import USAGE, Role, now
from fedwan.names import why_unsafe

CA_DAYS = 1826
"""Days that an authority lasts: five years."""
IDENTITY_DAYS = 90
"""Days that an identity lasts unless told otherwise."""
_CLOCK_SKEW = timedelta(minutes=5)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_PEM = serialization.Encoding.PEM


class _Authority(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def init(directory: Path, hosts: Sequence[str], days: int = IDENTITY_DAYS) -> None:
    """Make an authority in a folder, which must have none, and the coordinator's identity.

    `hosts` are DNS names and IP addresses that sites dial, beside `localhost` and `127.0.0.1`.
    """
    _alternative_names(hosts)  # refused before anything is made
    _check_days(days, CA_DAYS)
    folder = directory / "ca"
    if folder.exists():
        raise IdentityError(
            f"{folder} holds an authority already; issue from it, or choose another folder"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    # The name must differ between authorities: a verifier picks the issuer by name.
    subject = _name(f"fedwan authority {x509.random_serial_number() >> 128:08x}")
    builder = _builder(subject, subject, key, key, now() + timedelta(days=CA_DAYS), is_ca=True)
    authority = _Authority(builder.sign(key, hashes.SHA256()), key)
    # Built aside and renamed, so that a half-made authority never exists under its name.
    building = directory / f".ca-{os.getpid()}"
    try:
        building.mkdir(mode=0o700, parents=True)
        (building / "issued").mkdir()
        _write(building / "ca.crt", authority.certificate.public_bytes(_PEM))
        _write_key(building / "ca.key", key)
        _write(building / "crl.pem", _sign_crl({}, 1, authority))
        building.rename(folder)
    except OSError as error:
        raise IdentityError(f"{directory} cannot be written: {error}; choose another") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    renew(directory, hosts, days)


def renew(directory: Path, hosts: Sequence[str], days: int = IDENTITY_DAYS) -> None:
    """Give the coordinator a new identity from the same authority; sites keep theirs."""
    names, authority = _alternative_names(hosts), _read_authority(directory)
    _issue(directory, "coordinator", "coordinator", names, days, authority)
    _write(directory / "coordinator" / "crl.pem", (directory / "ca" / "crl.pem").read_bytes())


def issue(directory: Path, name: str, days: int = IDENTITY_DAYS) -> None:
    """Make a site's identity in `directory/name`; the name is a DNS label.

    It can be issued again once what it had is revoked or expired.
    """
    if reason := why_unsafe(name):
        raise IdentityError(f"site name {name!r} {reason}; choose another")
    authority = _read_authority(directory)
    revoked = _revoked(_read_crl(directory))
    for certificate in _issued(directory, name):
        if certificate.serial_number not in revoked and certificate.not_valid_after_utc > now():
            raise IdentityError(
                f"site {name!r} has an identity until {certificate.not_valid_after_utc:%Y-%m-%d}; "
                f"revoke it first: fedwan pki revoke {name} --pki {directory}"
            )
    _issue(directory, name, "site", [x509.DNSName(name)], days, authority)


def revoke(directory: Path, name: str) -> None:
    """Add every certificate of a site to the revocation list, and hand the list to the coordinator.

    A coordinator that runs from `directory/coordinator` takes notice at once; one that runs
    elsewhere needs the new `crl.pem` copied into its identity folder.
    """
    authority = _read_authority(directory)
    if why_unsafe(name) or not (certificates := _issued(directory, name)):
        raise IdentityError(
            f"site {name!r} was never issued by {directory}; the folder names are the sites' names"
        )
    old = _read_crl(directory)
    revoked = {certificate.serial_number: now() for certificate in certificates} | _revoked(old)
    number = old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number + 1
    pem = _sign_crl(revoked, number, authority)
    _write(directory / "ca" / "crl.pem", pem)
    if (directory / "coordinator").is_dir():
        _write(directory / "coordinator" / "crl.pem", pem)


# Certificates ------------------------------------------------------------------------------------


def _issue(
    directory: Path,
    name: str,
    role: Role,
    names: list[x509.GeneralName],
    days: int,
    authority: _Authority,
) -> None:
    """Sign and write one identity, and note its certificate with the authority."""
    ca, ca_key = authority
    _check_days(days, max(1, (ca.not_valid_after_utc - now()).days + 1))
    key = ec.generate_private_key(ec.SECP256R1())
    not_after = min(now() + timedelta(days=days), ca.not_valid_after_utc)
    certificate = (
        _builder(_name(name), ca.subject, key, ca_key, not_after, is_ca=False)
        .add_extension(x509.ExtendedKeyUsage([USAGE[role]]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(_PEM)
    # The authority's copy comes first: what it does not know it could never revoke.
    _write(directory / "ca" / "issued" / f"{name}.{certificate.serial_number:x}.crt", pem)
    folder = directory / name
    folder.mkdir(mode=0o700, exist_ok=True)
    _write_key(folder / "identity.key", key)
    _write(folder / "identity.crt", pem)
    _write(folder / "ca.crt", ca.public_bytes(_PEM))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    not_after: datetime,
    is_ca: bool,
) -> x509.CertificateBuilder:
    """What every certificate has. An authority signs certificates and CRLs, and nothing else."""
    unused = dict.fromkeys(
        "content_commitment key_encipherment data_encipherment key_agreement "
        "encipher_only decipher_only".split(),
        False,
    )
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **unused
    )
    public, path_length = key.public_key(), 0 if is_ca else None
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _CLOCK_SKEW)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(_key_identifier(issuer_key), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=path_length), critical=True)
        .add_extension(usage, critical=True)
    )


def _sign_crl(revoked: dict[int, datetime], number: int, authority: _Authority) -> bytes:
    """A revocation list, PEM, of serial numbers and when each was revoked."""
    ca, ca_key = authority
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now() - _CLOCK_SKEW)
        # As long as the authority lasts: a list that lapsed would shut every site out.
        .next_update(ca.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_key_identifier(ca_key), critical=False)
    )
    for serial, when in sorted(revoked.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(_PEM)


def _key_identifier(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """The names that a coordinator answers to: `hosts`, `localhost` and `127.0.0.1`."""
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


def _check_days(days: int, most: int) -> None:
    if not 1 <= days <= most:
        raise IdentityError(f"an identity cannot last {days} days; choose 1 to {most}")


# Files -------------------------------------------------------------------------------------------


def _read_authority(directory: Path) -> _Authority:
    folder = directory / "ca"
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    except FileNotFoundError as error:
        raise IdentityError(
            f"no authority in {directory}: {error.filename} is missing; "
            f"make one: fedwan pki init {directory} --host HOST"
        ) from None
    except (OSError, ValueError) as error:
        raise IdentityError(
            f"the authority in {folder} cannot be read: {error}; restore it from a backup"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{folder / 'ca.key'} is no EC key; restore it from a backup")
    if certificate.not_valid_after_utc <= now():
        raise IdentityError(
            f"the authority in {folder} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; "
            "make a new one in another folder, and issue every identity anew"
        )
    return _Authority(certificate, key)


def _read_crl(directory: Path) -> x509.CertificateRevocationList:
    path = directory / "ca" / "crl.pem"
    try:
        return x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityError(f"{path} cannot be read: {error}; restore it from a backup") from None


def _revoked(crl: x509.CertificateRevocationList) -> dict[int, datetime]:
    return {entry.serial_number: entry.revocation_date_utc for entry in crl}


def _issued(directory: Path, name: str) -> list[x509.Certificate]:
    files = sorted((directory / "ca" / "issued").glob(f"{name}.*.crt"))
    return [x509.load_pem_x509_certificate(file.read_bytes()) for file in files]


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(path, key.private_bytes(_PEM, form, encryption), mode=0o600)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file whole; a private one has its mode from the moment that it exists."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
