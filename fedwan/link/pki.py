"""The run's certificate authority: a folder that signs, renews and revokes identities.

    DIR/ca            ca.crt  SERIAL.key  crl.pem  issued/  stays with whoever runs the federation;
                      a lock, since several commands may run at once
    DIR/NAME          ca.crt  identity.crt                  what goes back to a party
    DIR/coordinator   beside these crl.pem; in a party's ca.crt and crl.pem stays what is
                      of other authorities

A party makes its key where it is used (`request`), in the folder that becomes its identity; the key
never leaves that folder. What travels is the request, and what the authority signed, neither
of which is secret. A party's key has mode 0600 and is not encrypted, since services start
unattended; the authority's is encrypted with a passphrase.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from filelock import FileLock

from fedwan.errors import IdentityError
from fedwan.files import replace_bytes
from fedwan.link import certificates
from fedwan.link.admission import is_list_of, read_lists
from fedwan.link.certificates import COORDINATOR, PEM, Issuer, check_name
from fedwan.link.tls import common_name, now

T = TypeVar("T")
_log = logging.getLogger(__name__)
IDENTITY_DAYS = 90
"""Days that an identity lasts unless told otherwise."""
LEAST_PASSPHRASE = 8
_MAX_REQUEST_BYTES = 1 << 16


def request(folder: Path, name: str, hosts: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Make a party's key in its folder, unless it has one, and `identity.csr` to be signed.

    `name` is the site's, a DNS label, or `coordinator`; `hosts` are DNS names and IP addresses that
    sites dial, beside `localhost` and `127.0.0.1`. Returns the key's fingerprint and all
    these hosts.
    """
    check_name(name)
    _check_dialled(name, hosts)
    names = x509.SubjectAlternativeName(certificates.alternative_names(name, hosts))
    builder = x509.CertificateSigningRequestBuilder().subject_name(certificates.name_of(name))
    path, csr = folder / "identity.key", folder / "identity.csr"
    with _using(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (other := _requested(csr)) not in ("", name):
            raise IdentityError(f"{folder} is {other}'s; give {name!r} a folder of its own")
        if not path.exists():
            _write_key(path, certificates.new_key(), None)
        key = _read_key(path, None)
        made = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
        replace_bytes(csr, made.public_bytes(PEM))
    return certificates.fingerprint(key.public_key()), certificates.hosts_of(made)


def _check_dialled(name: str, hosts: Sequence[str]) -> None:
    if hosts and name != COORDINATOR:
        raise IdentityError(f"hosts are the coordinator's; site {name!r} is dialled by nobody")


def _requested(csr: Path) -> str:
    """Whose request a folder holds; empty if there is none, or none that can be read."""
    if csr.exists():
        with suppress(IdentityError):
            return common_name(certificates.parse_request(csr.read_bytes(), str(csr)))
    return ""


def federation(folder: Path, hosts: Sequence[str], sites: Iterable[str]) -> Authority:
    """An authority and all parties in one folder, for a run on one machine.

    The authority's key is never written: nobody can add to the federation later, and the identities
    last as long as the authority does.
    """
    authority = Authority.make(folder, None)
    for name in (COORDINATOR, *sites):
        request(folder / name, name, hosts if name == COORDINATOR else ())
        authority.sign(folder / name / "identity.csr", certificates.CA_DAYS)
    return authority


class Authority:
    """The authority of a folder, its key decrypted; methods raise an `IdentityError`."""

    def __init__(self, directory: Path, issuer: Issuer) -> None:
        self.directory = directory
        self.certificate = issuer.certificate
        self._folder = directory / "ca"
        self._issuer = issuer

    @classmethod
    def make(cls, directory: Path, passphrase: bytes | None) -> Authority:
        """A new one, in a folder that has none; without a passphrase its key is not kept."""
        folder = directory / "ca"
        if folder.exists():
            raise IdentityError(
                f"{folder} holds an authority already; use that one, or choose another folder"
            )
        issuer = certificates.new_issuer()
        # Built aside and renamed, so that a half-made authority never exists under its name.
        with _using(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".ca-", dir=directory) as made:
                building = Path(made) / "ca"
                building.mkdir(mode=0o700)
                (building / "issued").mkdir()
                replace_bytes(building / "ca.crt", issuer.certificate.public_bytes(PEM))
                replace_bytes(building / "crl.pem", certificates.sign_revocations(issuer, {}, 1))
                if passphrase is not None:
                    _write_key(_key_path(building, issuer.certificate), issuer.key, passphrase)
                building.rename(folder)
        return cls(directory, issuer)

    @classmethod
    def open(cls, directory: Path, passphrase: bytes) -> Authority:
        """Read it, and decrypt its key."""
        folder = directory / "ca"
        with _using(directory):
            if not folder.exists():
                raise IdentityError(
                    f"{directory} holds no authority; make one: fedwan pki init {directory}"
                )
            certificate = _read(folder / "ca.crt", x509.load_pem_x509_certificate)
            if (until := certificate.not_valid_after_utc) <= now():
                raise IdentityError(
                    f"the authority in {folder} expired on {until:%Y-%m-%d}; "
                    "make a new one in another folder, and sign every identity anew"
                )
            key = _read_key(_key_path(folder, certificate), passphrase)
        return cls(directory, Issuer(certificate, key))

    def sign(self, path: Path, days: int = IDENTITY_DAYS) -> x509.Certificate:
        """Sign a request, for so many days or as long as the authority lasts.

        A name that has an identity gets another one for the same key only: for another key, what it
        has must be revoked first.
        """
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_REQUEST_BYTES)
        except OSError as error:
            raise IdentityError(
                f"request {path} cannot be read: {error.strerror}; give the identity.csr that "
                "`fedwan pki request` made"
            ) from None
        wanted = certificates.parse_request(data, f"request {path}")
        name, key = common_name(wanted), wanted.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        with self._alone():
            for issued in self._issued(name):
                is_same, is_revoked = issued.public_key() == key, self._is_revoked(issued)
                until = issued.not_valid_after_utc
                if is_same and is_revoked:
                    raise IdentityError(
                        f"the key of {name!r} in {path} was revoked; have its identity.key "
                        f"deleted, and another made: fedwan pki request {name}"
                    )
                if not (is_same or is_revoked or until <= now()):
                    raise IdentityError(
                        f"{name!r} has an identity of another key until {until:%Y-%m-%d}; if that "
                        f"key is lost, revoke it first: fedwan pki revoke {name} --pki "
                        f"{self.directory}"
                    )
            return self._issue(name, key, certificates.hosts_of(wanted), days)

    def renew(
        self, name: str, hosts: Sequence[str] = (), days: int = IDENTITY_DAYS
    ) -> x509.Certificate:
        """Sign a party's newest identity again, for the same key; what it has stays valid.

        `hosts`, if there are any, take the place of those that a coordinator had.
        """
        _check_dialled(name, hosts)
        with self._alone():
            if not (found := [c for c in self._issued(name) if not self._is_revoked(c)]):
                raise IdentityError(
                    f"{name!r} has no identity of {self.directory} that is not revoked; "
                    f"have it make a request: fedwan pki request {name}"
                )
            newest = found[-1]
            key = newest.public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            return self._issue(name, key, hosts or certificates.hosts_of(newest), days)

    def revoke(self, name: str) -> Path:
        """Put every certificate of a party on the revocation list, and give the list's path.

        A coordinator that runs from `DIR/coordinator` takes notice within seconds; one that runs
        elsewhere needs the new `crl.pem` copied into its identity folder. Where a certificate is
        damaged and its file's name has no serial number, an `IdentityError` once the others are on.
        """
        with self._alone():
            if not (paths := self._paths(name)):
                raise IdentityError(
                    f"{name!r} was never signed by {self.directory}; the folder names are the names"
                )
            serials = {path: _serials_of(path) for path in paths}
            written = self._list(chain(*serials.values()))
        if lost := [str(path) for path, found in serials.items() if not found]:
            raise IdentityError(
                f"{name!r} is revoked but for {', '.join(lost)}, which is damaged and not named "
                "for its serial number; restore it from a backup, and revoke again"
            )
        return written

    def others(self, name: str) -> list[x509.Certificate]:
        """The other authorities that a party's folder here trusts: those that were put there."""
        found = _read_if_good(self.directory / name / "ca.crt", x509.load_pem_x509_certificates)
        return [authority for authority in found if authority != self.certificate]

    # Files -------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While what is in the folder decides what is written: one at a time, in all processes."""
        with _using(self.directory), FileLock(self._folder / "lock"):
            yield

    def _issue(
        self, name: str, key: ec.EllipticCurvePublicKey, hosts: Sequence[str], days: int
    ) -> x509.Certificate:
        """Sign and write one identity, and note its certificate with the authority."""
        if not 1 <= days <= certificates.CA_DAYS:
            most = certificates.CA_DAYS
            raise IdentityError(f"an identity cannot last {days} days; choose 1 to {most}")
        certificate = certificates.sign(self._issuer, name, key, hosts, days)
        pem, folder = certificate.public_bytes(PEM), self.directory / name
        # The authority's copy comes first: what it does not know it could never revoke.
        replace_bytes(self._folder / "issued" / f"{name}.{certificate.serial_number:x}.crt", pem)
        folder.mkdir(mode=0o700, exist_ok=True)
        trusted = [self.certificate, *self.others(name)]
        replace_bytes(folder / "ca.crt", b"".join(ca.public_bytes(PEM) for ca in trusted))
        if name == COORDINATOR:
            self._list()
        replace_bytes(folder / "identity.crt", pem)
        return certificate

    def _list(self, serials: Iterable[int] = ()) -> Path:
        """Revoke, and bring the list to the coordinator's folder, if there is one; the last's path.

        What the list there has revoked stays so: it may be of a copy of this authority.
        """
        path, folder = self._folder / "crl.pem", self.directory / COORDINATOR
        there, others = _read_if_good(folder / "crl.pem", read_lists), self.others(COORDINATOR)
        ours = [self._revocations(), *filter(partial(is_list_of, self.certificate), there)]
        revoked = dict.fromkeys(serials, now())
        revoked |= {entry.serial_number: entry.revocation_date_utc for crl in ours for entry in crl}
        if len(revoked) > len(ours[0]):
            number = max(map(certificates.list_number, ours)) + 1
            replace_bytes(path, certificates.sign_revocations(self._issuer, revoked, number))
        if folder.is_dir():
            # One of our name that nobody there has signed is damaged.
            kept = [
                crl.public_bytes(PEM)
                for crl in there
                if crl.issuer != self.certificate.subject
                or any(is_list_of(other, crl) for other in others)
            ]
            data = b"".join([path.read_bytes(), *kept])
            replace_bytes(path := folder / "crl.pem", data)
        return path

    def _revocations(self) -> x509.CertificateRevocationList:
        return _read(self._folder / "crl.pem", x509.load_pem_x509_crl)

    def _paths(self, name: str) -> list[Path]:
        check_name(name)
        return sorted((self._folder / "issued").glob(f"{name}.*.crt"))

    def _issued(self, name: str) -> list[x509.Certificate]:
        """A party's certificates, the newest last."""
        fault = f"it is damaged; restore it from a backup, or revoke {name} and then delete it"
        paths = self._paths(name)
        issued = [_read(path, x509.load_pem_x509_certificate, fault) for path in paths]
        return sorted(issued, key=lambda each: (each.not_valid_before_utc, each.serial_number))

    def _is_revoked(self, certificate: x509.Certificate) -> bool:
        serial = certificate.serial_number
        return self._revocations().get_revoked_certificate_by_serial_number(serial) is not None


def _serials_of(path: Path) -> set[int]:
    """Of an issued certificate, and of its file's name, for either may be damaged."""
    found, digits = set(), path.name.split(".")[-2]
    with suppress(IdentityError):
        found.add(_read(path, x509.load_pem_x509_certificate).serial_number)
    if re.fullmatch("[0-7]?[0-9a-f]{1,39}", digits):
        found.add(int(digits, 16))
    return found - {0}


def _key_path(folder: Path, certificate: x509.Certificate) -> Path:
    return folder / f"{certificate.serial_number:x}.key"


def _read(
    path: Path,
    parse: Callable[[bytes], T],
    fault: str = "it is damaged; restore it from a backup",
) -> T:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        raise IdentityError(f"{path} is missing; restore it from a backup") from None
    except certificates.UNREADABLE:
        raise IdentityError(f"{path} cannot be read: {fault}") from None


def _read_if_good(path: Path, parse: Callable[[bytes], list[T]]) -> list[T]:
    """What a party's file has, which is about to be replaced."""
    if not path.exists():
        return []
    try:
        return _read(path, parse)
    except IdentityError:
        _log.warning("%s is damaged: put back what it had of other authorities, if anything", path)
        return []


def _read_key(path: Path, passphrase: bytes | None) -> ec.EllipticCurvePrivateKey:
    fault = "it is damaged or has a passphrase; restore it from a backup"
    if passphrase is not None:
        fault = (
            "it has another passphrase or is damaged; give the one that it was made with, or "
            "restore it from a backup"
        )
    key = _read(path, lambda data: serialization.load_pem_private_key(data, passphrase), fault)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{path} is no EC key; restore it from a backup")
    return key


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, passphrase: bytes | None) -> None:
    """Without a passphrase it is not encrypted."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        if len(passphrase) < LEAST_PASSPHRASE:
            raise IdentityError(
                f"the passphrase has {len(passphrase)} bytes; take at least {LEAST_PASSPHRASE}"
            )
        encryption = serialization.BestAvailableEncryption(passphrase)
    form = serialization.PrivateFormat.PKCS8
    replace_bytes(path, key.private_bytes(PEM, form, encryption), 0o600)


@contextmanager
def _using(folder: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        path = Path(error.filename or folder)
        raise IdentityError(f"{path} may not be read or written; {_permit(path)}") from None
    except OSError as error:
        path = error.filename or folder
        raise IdentityError(f"{path} cannot be written: {error.strerror}; choose another") from None


def _permit(path: Path) -> str:
    """How one may use a file, by who owns it or, where that cannot be seen, the folder above."""
    for each in (path, *path.absolute().parents):
        with suppress(OSError):
            owner = each.stat().st_uid
            break
    if owner == os.geteuid():
        return f"let yourself: chmod -R u+rwX {path.parent}"
    name = f"#{owner}"
    with suppress(KeyError):
        name = pwd.getpwuid(owner).pw_name
    return f"run this as its owner: sudo -u {name}, or choose another folder"
