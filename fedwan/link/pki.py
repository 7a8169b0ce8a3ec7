"""The run's certificate authority: a folder that issues, and revokes, identities.

    DIR/ca            ca.crt  ca.key  crl.pem  issued/      stays with whoever runs the federation
    DIR/coordinator   ca.crt  identity.crt  identity.key  crl.pem
    DIR/SITE          ca.crt  identity.crt  identity.key    goes to that site

Keys are EC P-256 and are created with mode 0600. A site's identity may open connections
(clientAuth) and the coordinator's may accept them (serverAuth), never both, so that a site's
stolen key cannot impersonate the coordinator.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedwan.errors import IdentityError
from fedwan.link.certificates import (
    Role,
    alternative_names,
    new_key,
    now,
    private_pem,
    public_pem,
    sign_authority,
    sign_crl,
    sign_identity,
)
from fedwan.names import why_unsafe

__all__ = ["CA_DAYS", "IDENTITY_DAYS", "init", "issue", "renew", "revoke"]

CA_DAYS = 1826
"""Days that an authority lasts: five years."""
IDENTITY_DAYS = 90
"""Days that an identity lasts unless told otherwise."""


def init(directory: Path, hosts: Sequence[str], days: int = IDENTITY_DAYS) -> None:
    """Make an authority, and the coordinator's identity.

    Args:
        directory: the folder of the authority; made where it does not exist.
        hosts: DNS names and IP addresses that sites dial; `localhost` and `127.0.0.1` are added.
        days: that the coordinator's identity lasts.

    Raises:
        IdentityError: the folder holds an authority already, or a host is no name or address.
    """
    names = alternative_names(hosts)
    _check_days(days, CA_DAYS)
    folder = directory / "ca"
    if folder.exists():
        raise IdentityError(
            f"{folder} holds an authority already; issue from it, or choose another folder"
        )
    key = new_key()
    certificate = sign_authority(key, now() + timedelta(days=CA_DAYS))
    # Built aside and renamed, so that a half-made authority never exists under its name.
    building = directory / f".ca-{os.getpid()}"
    try:
        building.mkdir(mode=0o700, parents=True)
        (building / "issued").mkdir()
        _write(building / "ca.crt", public_pem(certificate))
        _write(building / "ca.key", private_pem(key), mode=0o600)
        _write(building / "crl.pem", public_pem(sign_crl({}, 1, (certificate, key))))
        building.rename(folder)
    except OSError as error:
        raise IdentityError(f"{directory} cannot be written: {error}; choose another") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _issue_coordinator(directory, names, days)


def renew(directory: Path, hosts: Sequence[str], days: int = IDENTITY_DAYS) -> None:
    """Give the coordinator a new identity from the same authority; sites keep theirs.

    Args:
        directory: the folder of the authority.
        hosts: as for `init`.
        days: that the new identity lasts.

    Raises:
        IdentityError: there is no authority, or a host is no name or address.
    """
    _issue_coordinator(directory, alternative_names(hosts), days)


def issue(directory: Path, name: str, days: int = IDENTITY_DAYS) -> None:
    """Make a site's identity in `directory/name`.

    A name can be issued again once what it had is revoked or expired.

    Args:
        directory: the folder of the authority.
        name: the site, a DNS label.
        days: that the identity lasts.

    Raises:
        IdentityError: no authority here, an unsafe name, or a name that has a valid identity.
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

    Args:
        directory: the folder of the authority.
        name: the site.

    Raises:
        IdentityError: no authority here, or no identity of that name was issued.
    """
    authority = _read_authority(directory)
    if why_unsafe(name) or not (certificates := _issued(directory, name)):
        raise IdentityError(
            f"site {name!r} was never issued by {directory}; the folder names are the sites' names"
        )
    old = _read_crl(directory)
    revoked = {certificate.serial_number: now() for certificate in certificates} | _revoked(old)
    number = old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number + 1
    pem = public_pem(sign_crl(revoked, number, authority))
    _write(directory / "ca" / "crl.pem", pem)
    if (directory / "coordinator").is_dir():
        _write(directory / "coordinator" / "crl.pem", pem)


def _issue_coordinator(directory: Path, names: list[x509.GeneralName], days: int) -> None:
    _issue(directory, "coordinator", "coordinator", names, days, _read_authority(directory))
    crl = (directory / "ca" / "crl.pem").read_bytes()
    _write(directory / "coordinator" / "crl.pem", crl)


def _issue(
    directory: Path,
    name: str,
    role: Role,
    names: list[x509.GeneralName],
    days: int,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
) -> None:
    """Sign and write one identity, and note its certificate with the authority."""
    ca = authority[0]
    _check_days(days, max(1, (ca.not_valid_after_utc - now()).days + 1))
    key = new_key()
    not_after = min(now() + timedelta(days=days), ca.not_valid_after_utc)
    certificate = sign_identity(name, role, names, key.public_key(), authority, not_after)
    # The authority's copy comes first: what it does not know it could never revoke.
    issued = directory / "ca" / "issued" / f"{name}.{certificate.serial_number:x}.crt"
    _write(issued, public_pem(certificate))
    folder = directory / name
    folder.mkdir(mode=0o700, exist_ok=True)
    _write(folder / "identity.key", private_pem(key), mode=0o600)
    _write(folder / "identity.crt", public_pem(certificate))
    _write(folder / "ca.crt", public_pem(ca))


def _read_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
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
    return certificate, key


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


def _check_days(days: int, most: int) -> None:
    if not 1 <= days <= most:
        raise IdentityError(f"an identity cannot last {days} days; choose 1 to {most}")


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
