"""Identities that change while they are in use: renewed or revoked.

Whatever replaces a file of an identity's folder, `fedwan pki` or a copy from elsewhere, is noticed
at the next look, which costs a few calls of the kernel.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from cryptography import x509

from fedwan.errors import IdentityError
from fedwan.link.tls import FILES, Identity, has_issued, now, parse_file, read_file

if TYPE_CHECKING:
    import grpc

_log = logging.getLogger(__name__)
WARN = timedelta(days=14)
"""Before an identity expires, from which on that is told."""
GONE_S = 600.0
"""How long the last revocation list holds once its file is gone."""
_END_OF_LIST = b"-----END X509 CRL-----"


def read_lists(data: bytes) -> list[x509.CertificateRevocationList]:
    """The revocation lists of a PEM file, which may hold one for each authority."""
    parts = [part for part in data.split(_END_OF_LIST) if part.strip()]
    return [x509.load_pem_x509_crl(part + _END_OF_LIST) for part in parts]


class IdentityFiles:
    """Files of an identity folder, any of which may be replaced."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._paths = [folder / name for name in names]
        self._seen: list[tuple[int, int, int] | None] = []
        self._told: object = None

    def changed(self) -> bool:
        """Whether any is another file than at the last call; True at the first."""
        before, self._seen = self._seen, [_stamp(path) for path in self._paths]
        return self._seen != before

    def keep(self, what: str, error: IdentityError) -> None:
        """Say why these are not taken, once; they are read again, for it may be a passing fault."""
        if (told := (str(error), self._seen)) != self._told:
            _log.warning("keeping %s: %s", what, error)
        self._told, self._seen = told, []


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    # Files are replaced whole, so the inode tells even where the clock is too coarse.
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class Lapse(str):
    """An objection that is the coordinator's to mend, and no fault of the certificate."""


_LAPSE = Lapse(
    "is of an authority whose revocation list has lapsed here; whoever runs the coordinator has to "
    "bring a new crl.pem"
)
_GONE = Lapse(
    "cannot be checked any more, the coordinator's revocation list is gone; whoever runs the "
    "coordinator has to bring crl.pem back"
)
_REVOKED = "is revoked"


def refusal(name: str, why: str) -> str:
    """What a site is told whose certificate is objected to, with the mend."""
    told = f"the certificate of {name} {why}"
    if isinstance(why, Lapse):
        return told
    if why == _REVOKED:  # and no authority signs its key again
        return f"{told}; delete identity.key there, and request anew: fedwan pki request {name} DIR"
    return f"{told}; have another one signed by whoever runs the federation"


class Admission:
    """Which certificates a coordinator serves, by the `crl.pem` in its identity folder.

    None that is revoked or expired, or whose authority has no revocation list there. The file is
    read again whenever it changes; an `IdentityError` at first if it is missing, or no authority of
    `ca.crt` has signed it. Once it has been missing for `GONE_S`, none. What one list has revoked
    stays revoked here, also where an older one takes its place, or that of a copy of the authority.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._files = IdentityFiles(folder, "crl.pem", "ca.crt")
        self._files.changed()  # what is read now is not read again at the first objection
        self._revoked: dict[x509.Certificate, set[int]] = {}
        """Serial numbers of each authority, of all its lists so far."""
        self._read()
        self._warned: set[x509.Name] = set()
        """Issuers whose list has lapsed, and was told to have."""
        self._gone_s = 0.0
        """When the file was first missed; 0 while it is there."""
        for _, crl in self._lists:
            if _has_lapsed(crl):
                self._warn(crl.issuer)

    def objection(self, certificate: x509.Certificate) -> str:
        """Why a certificate, which TLS has verified, is not served now; empty if it is.

        A `Lapse` where it may be served once there is another list.
        """
        with self._lock:
            if self._files.changed():
                try:
                    self._read()
                    self._warned, self._gone_s = set(), 0.0
                except IdentityError as error:
                    # A broken list must neither admit who was revoked nor end a run of weeks.
                    self._files.keep("the last good revocation list", error)
                    is_there = (self._folder / "crl.pem").exists()
                    self._gone_s = 0.0 if is_there else self._gone_s or time.monotonic()
            why = self._objection(certificate)
            if isinstance(why, Lapse):
                self._warn(certificate.issuer)
            return why

    def _read(self) -> None:
        self._lists = _read_lists(self._folder)
        for authority in {authority for authority, _ in self._lists}:
            lists = [crl for found, crl in self._lists if found == authority]
            listed = {entry.serial_number for crl in lists for entry in crl}
            revoked = self._revoked.setdefault(authority, set())
            if lost := revoked - listed:
                _log.warning(
                    "%s no longer has %d of the revoked certificates of %s (serial %x): these stay "
                    "revoked until the coordinator is started again; unless they have expired, "
                    "bring the authority's newest list, or revoke them again",
                    *(self._folder / "crl.pem", len(lost)),
                    *(authority.subject.rfc4514_string(), min(lost)),
                )
            revoked |= listed

    def _warn(self, issuer: x509.Name) -> None:
        if issuer not in self._warned:
            self._warned.add(issuer)
            path, text = self._folder / "crl.pem", issuer.rfc4514_string()
            _log.warning("%s has no valid list of %s: copy a new one there", path, text)

    def _objection(self, certificate: x509.Certificate) -> str:
        expires = certificate.not_valid_after_utc
        if expires <= now():
            return f"expired on {expires:%Y-%m-%d %H:%M} UTC"
        if self._gone_s and time.monotonic() - self._gone_s > GONE_S:
            return _GONE
        lists = [crl for authority, crl in self._lists if _has_issued(authority, certificate)]
        if not lists:
            return "is of an authority without a revocation list here"
        for authority, revoked in self._revoked.items():
            if certificate.serial_number in revoked and _has_issued(authority, certificate):
                return _REVOKED
        return _LAPSE if all(map(_has_lapsed, lists)) else ""


def is_list_of(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    """Whether an authority has made and signed a revocation list."""
    key = authority.public_key()
    return crl.issuer == authority.subject and crl.is_signature_valid(key)  # type: ignore[arg-type]


def _has_lapsed(crl: x509.CertificateRevocationList) -> bool:
    return crl.next_update_utc is not None and crl.next_update_utc <= now()


_has_issued = lru_cache(maxsize=1 << 10)(has_issued)


def _read_lists(folder: Path) -> list[tuple[x509.Certificate, x509.CertificateRevocationList]]:
    """The revocation lists of a coordinator's folder, each with its authority, trusted here."""
    path, ca_path = folder / "crl.pem", folder / "ca.crt"
    if not path.exists():
        raise IdentityError(
            f"{path} is missing, the authority's list of revoked certificates; copy its "
            "ca/crl.pem there"
        )
    authorities = parse_file(read_file(ca_path), ca_path)
    mend = "copy it again from the authority"
    try:
        lists = read_lists(read_file(path))
    except ValueError:
        raise IdentityError(f"{path} cannot be read as PEM; {mend}") from None
    lists = [crl for crl in lists if crl.issuer in {ca.subject for ca in authorities}]
    found = [(ca, crl) for crl in lists for ca in authorities if is_list_of(ca, crl)]
    if not found or {id(crl) for crl in lists} != {id(crl) for _, crl in found}:
        raise IdentityError(f"{path} was not signed by {ca_path}; {mend}")
    return found


class Renewable:
    """An identity whose files may be replaced by a renewed one's while it is in use."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._files = IdentityFiles(identity.folder, *FILES)
        self._lock = Lock()
        self._warned: datetime | None = None

    def renew(self) -> bool:
        """Whether the folder holds another one, and `identity` is that from now on.

        Costs three looks at files. What is not whole, or not good, is told and not taken; so is,
        once a day, that the one in use is about to expire.
        """
        with self._lock:
            if not self._files.changed():
                self._warn(now())
                return False
            try:
                found = Identity.load(self.identity.folder, self.identity.role)
            except IdentityError as error:
                self._files.keep("the identity that is in use", error)
                return False
            if found == self.identity:
                return False
            self.identity = found
        until = self.identity.expires
        _log.info("the identity in %s is renewed, until %s", self.identity.folder, until.date())
        return True

    def _warn(self, now: datetime) -> None:
        own, before = self.identity, self._warned
        if own.expires - now > WARN or (before and now - before < timedelta(days=1)):
            return
        self._warned = now
        _log.warning(
            "the identity in %s expires on %s UTC; have it renewed at the authority: "
            "fedwan pki renew %s",
            *(own.folder, f"{own.expires:%Y-%m-%d %H:%M}", own.name),
        )

    def grpc_server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server that admits only certificates of the run's authorities."""
        import grpc

        def present() -> grpc.ServerCertificateConfiguration:
            pair = (self.identity.key_pem, self.identity.cert_pem)
            return grpc.ssl_server_certificate_configuration([pair], self.identity.ca_pem)

        return grpc.dynamic_ssl_server_credentials(
            present(),
            lambda: present() if self.renew() else None,  # asked at each handshake
            require_client_authentication=True,
        )
