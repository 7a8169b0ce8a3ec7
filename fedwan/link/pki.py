"""The run's certificate authority: a folder that signs, renews and revokes identities.

    DIR/ca            ca.crt  SERIAL.key  crl.pem  issued/  stays with whoever runs the federation
    DIR/NAME          ca.crt  identity.crt                  what goes back to a party
    DIR/coordinator   beside these crl.pem

A party makes its key where it is used (`request`), in the folder that becomes its identity; the key
never leaves that folder. What travels is the request, and what the authority signed, neither
of which is secret. A party's key has mode 0600 and is not encrypted, since services start
unattended; the authority's is encrypted with a passphrase.

A federation may change its authority while it runs: `succeed` makes the next one, and both are
trusted until `retire`. `ca.crt` and `crl.pem` hold one certificate and one list of each, the newest
first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedwan.errors import IdentityError
from fedwan.files import replace_bytes
from fedwan.link import certificates
from fedwan.link.admission import read_lists
from fedwan.link.certificates import COORDINATOR, PEM, Issuer, check_days, check_name
from fedwan.link.tls import common_name, now

IDENTITY_DAYS = 90
"""Days that an identity lasts unless told otherwise."""
LEAST_PASSPHRASE = 8
_MAX_REQUEST_BYTES = 1 << 16


def request(folder: Path, name: str, hosts: Sequence[str] = ()) -> str:
    """Make a party's key in its folder, unless it has one, and `identity.csr` to be signed.

    `name` is the site's, a DNS label, or `coordinator`; `hosts` are DNS names and IP addresses that
    sites dial, beside `localhost` and `127.0.0.1`. Returns the key's fingerprint.
    """
    check_name(name)
    if hosts and name != COORDINATOR:
        raise IdentityError(f"hosts are the coordinator's; site {name!r} is dialled by nobody")
    certificates.alternative_names(name, hosts)  # refused before anything is made
    path = folder / "identity.key"
    with _writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_key(path, certificates.new_key(), None)
        key = _read_key(path, None)
        made = certificates.new_request(key, name, hosts)
        replace_bytes(folder / "identity.csr", made.public_bytes(PEM))
    return certificates.fingerprint(key.public_key())


def federation(folder: Path, hosts: Sequence[str], sites: Iterable[str]) -> Authority:
    """An authority and all parties in one folder, for a run on one machine.

    The authority's key is never written: nobody can add to the federation later, and the identities
    last as long as the authority does.
    """
    authority = Authority.make(folder, None)
    for name in (COORDINATOR, *sites):
        request(folder / name, name, hosts if name == COORDINATOR else ())
        authority.sign(folder / name / "identity.csr", authority.lasts_days)
    return authority


class Authority:
    """The authority of a folder, its key decrypted; methods raise an `IdentityError`."""

    def __init__(self, directory: Path, issuers: Sequence[Issuer]) -> None:
        self.directory = directory
        self._folder = directory / "ca"
        self._issuers = list(issuers)
        """The newest first."""

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
        building = directory / f".ca-{os.getpid()}"
        try:
            with _writing(directory):
                building.mkdir(mode=0o700, parents=True)
                (building / "issued").mkdir()
                replace_bytes(building / "ca.crt", issuer.certificate.public_bytes(PEM))
                replace_bytes(building / "crl.pem", certificates.sign_revocations(issuer, {}, 1))
                if passphrase is not None:
                    _write_key(_key_path(building, issuer.certificate), issuer.key, passphrase)
                building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return cls(directory, [issuer])

    @classmethod
    def open(cls, directory: Path, passphrase: bytes) -> Authority:
        """Read it, and decrypt its keys."""
        folder = directory / "ca"
        try:
            found = x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())
        except FileNotFoundError as error:
            raise IdentityError(
                f"no authority in {directory}: {error.filename} is missing; "
                f"make one: fedwan pki init {directory}"
            ) from None
        except (OSError, ValueError) as error:
            raise IdentityError(
                f"the authority in {folder} cannot be read: {error}; restore it from a backup"
            ) from None
        keys = [_read_key(_key_path(folder, certificate), passphrase) for certificate in found]
        if found[0].not_valid_after_utc <= now():
            raise IdentityError(
                f"the authority in {folder} expired on {found[0].not_valid_after_utc:%Y-%m-%d}; "
                "make a new one in another folder, and sign every identity anew"
            )
        return cls(directory, [Issuer(*pair) for pair in zip(found, keys, strict=True)])

    @property
    def lasts_days(self) -> int:
        """Days that it still lasts."""
        return max(1, (self._issuers[0].certificate.not_valid_after_utc - now()).days + 1)

    def sign(self, path: Path, days: int = IDENTITY_DAYS) -> tuple[str, str]:
        """Sign a request; the party's name, and its key's fingerprint.

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
        for certificate in self._issued(name):
            is_same = certificate.public_key() == key
            if is_same and self._is_revoked(certificate):
                raise IdentityError(
                    f"the key of {name!r} in {path} was revoked, or its authority is trusted no "
                    f"more; have its identity.key deleted, and another made: fedwan pki request "
                    f"{name}"
                )
            if not is_same and not self._is_over(certificate):
                raise IdentityError(
                    f"{name!r} has an identity of another key until "
                    f"{certificate.not_valid_after_utc:%Y-%m-%d}; if that key is lost, revoke it "
                    f"first: fedwan pki revoke {name} --pki {self.directory}"
                )
        self._issue(name, key, certificates.hosts_of(wanted), days)
        return name, certificates.fingerprint(key)

    def renew(self, name: str, hosts: Sequence[str] = (), days: int = IDENTITY_DAYS) -> None:
        """Sign a party's newest identity again, for the same key; what it has stays valid.

        `hosts`, if there are any, take the place of those that a coordinator had.
        """
        if not (found := [c for c in self._issued(name) if not self._is_revoked(c)]):
            raise IdentityError(
                f"{name!r} has no identity of {self.directory} that is not revoked; "
                f"have it make a request: fedwan pki request {name}"
            )
        newest = found[-1]
        key = newest.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        self._issue(name, key, hosts or certificates.hosts_of(newest), days)

    def revoke(self, name: str) -> Path:
        """Put every certificate of a party on the revocation list, and give the list's path.

        A coordinator that runs from `DIR/coordinator` takes notice within seconds; one that runs
        elsewhere needs the new `crl.pem` copied into its identity folder.
        """
        if not (found := self._issued(name)):
            raise IdentityError(
                f"{name!r} was never signed by {self.directory}; the folder names are the names"
            )
        return self._write_revocations(found)

    def succeed(self, passphrase: bytes) -> None:
        """Make the next authority, which signs from now on; both are trusted until `retire`."""
        if len(self._issuers) > 1:
            raise IdentityError(
                "the authority before this one is still trusted; end that first: "
                f"fedwan pki revoke ca --pki {self.directory}"
            )
        issuer = certificates.new_issuer()
        with _writing(self._folder):
            _write_key(_key_path(self._folder, issuer.certificate), issuer.key, passphrase)
        self._issuers.insert(0, issuer)
        self._hand_out_trust()

    def retire(self) -> None:
        """Trust the authority before this one no more; every identity must be of the new one."""
        if len(self._issuers) < 2:
            raise IdentityError(
                f"{self.directory} has one authority; make the next one first: "
                f"fedwan pki renew ca --pki {self.directory}"
            )
        present = self._issuers[0].certificate.subject
        valid = [c for c in self._issued("*") if not self._is_over(c)]
        renewed = {common_name(c) for c in valid if c.issuer == present}
        if late := sorted({common_name(c) for c in valid} - renewed):
            raise IdentityError(
                f"{', '.join(late)} would be shut out, having no identity of the new authority; "
                f"renew first: fedwan pki renew {late[0]} --pki {self.directory}"
            )
        before = self._issuers.pop()
        self._hand_out_trust()
        _key_path(self._folder, before.certificate).unlink(missing_ok=True)

    # Files -------------------------------------------------------------------------------------

    def _issue(
        self, name: str, key: ec.EllipticCurvePublicKey, hosts: Sequence[str], days: int
    ) -> None:
        """Sign and write one identity, and note its certificate with the authority."""
        check_days(days, self.lasts_days)
        certificate = certificates.sign(self._issuers[0], name, key, hosts, days)
        pem = certificate.public_bytes(PEM)
        with _writing(self.directory):
            # The authority's copy comes first: what it does not know it could never revoke.
            replace_bytes(
                self._folder / "issued" / f"{name}.{certificate.serial_number:x}.crt", pem
            )
            folder = self.directory / name
            folder.mkdir(mode=0o700, exist_ok=True)
            replace_bytes(folder / "ca.crt", (self._folder / "ca.crt").read_bytes())
            if name == COORDINATOR:
                replace_bytes(folder / "crl.pem", (self._folder / "crl.pem").read_bytes())
            replace_bytes(folder / "identity.crt", pem)

    def _hand_out_trust(self) -> None:
        """Write `ca.crt`, here and in every party's folder, and the lists."""
        bundle = b"".join(issuer.certificate.public_bytes(PEM) for issuer in self._issuers)
        with _writing(self.directory):
            # The lists first: an authority without one is not believed.
            self._write_revocations()
            for path in self.directory.glob("*/ca.crt"):
                replace_bytes(path, bundle)

    def _write_revocations(self, more: Iterable[x509.Certificate] = ()) -> Path:
        before, added, lists = self._lists(), list(more), b""
        for issuer in self._issuers:
            name, number = issuer.certificate.subject, 0
            revoked = {c.serial_number: now() for c in added if c.issuer == name}
            if (old := before.get(name)) is not None:
                revoked |= {entry.serial_number: entry.revocation_date_utc for entry in old}
                number = old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            lists += certificates.sign_revocations(issuer, revoked, number + 1)
        with _writing(self.directory):
            replace_bytes(path := self._folder / "crl.pem", lists)
            if (self.directory / COORDINATOR).is_dir():
                replace_bytes(path := self.directory / COORDINATOR / "crl.pem", lists)
        return path

    def _lists(self) -> dict[x509.Name, x509.CertificateRevocationList]:
        path = self._folder / "crl.pem"
        try:
            found = read_lists(path.read_bytes())
        except (OSError, ValueError) as error:
            raise IdentityError(
                f"{path} cannot be read: {error}; restore it from a backup"
            ) from None
        return {crl.issuer: crl for crl in found}

    def _issued(self, name: str) -> list[x509.Certificate]:
        """A party's certificates, or those of all (`*`), the newest last."""
        if name != "*":
            check_name(name)
        found = (self._folder / "issued").glob(f"{name}.*.crt")
        files = sorted(found, key=lambda file: (file.stat().st_mtime_ns, file.name))
        return [_read_certificate(file) for file in files]

    def _is_revoked(self, certificate: x509.Certificate) -> bool:
        """Or of an authority that is trusted no more, whose list is gone."""
        crl, serial = self._lists().get(certificate.issuer), certificate.serial_number
        return crl is None or crl.get_revoked_certificate_by_serial_number(serial) is not None

    def _is_over(self, certificate: x509.Certificate) -> bool:
        return certificate.not_valid_after_utc <= now() or self._is_revoked(certificate)


def _key_path(folder: Path, certificate: x509.Certificate) -> Path:
    return folder / f"{certificate.serial_number:x}.key"


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityError(f"{path} cannot be read: {error}; restore it from a backup") from None


def _read_key(path: Path, passphrase: bytes | None) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), passphrase)
    except FileNotFoundError:
        raise IdentityError(f"{path} is missing; restore it from a backup") from None
    except (OSError, ValueError, TypeError) as error:
        is_wrong = passphrase is not None and "password" in str(error).lower()
        why = "the passphrase is not its own" if is_wrong else str(error)
        mend = "give the one that it was made with" if is_wrong else "restore it from a backup"
        raise IdentityError(f"key {path} cannot be read: {why}; {mend}") from None
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
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise IdentityError(f"{folder} cannot be written: {error}; choose another") from None
