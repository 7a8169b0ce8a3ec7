"""A party's TLS identity: read from its folder, checked before any socket opens, and put to use.

Every connection is mutual TLS 1.2 or newer with the run's own authority; the peer's certificate,
not a field in a message, says which site it is.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from fedwan.errors import IdentityError
from fedwan.link.certificates import Role, common_name, now, usage_of

if TYPE_CHECKING:
    import grpc

__all__ = ["Identity", "RevocationList", "certificate_name"]

_log = logging.getLogger(__name__)


def certificate_name(certificate: bytes) -> str:
    """The common name in a certificate, PEM or DER: the site that it stands for."""
    return common_name(_parse(certificate))


class RevocationList:
    """The coordinator's `crl.pem`, read again whenever the file changes.

    Args:
        folder: an identity folder; without a `crl.pem` in it nothing is revoked.

    Raises:
        IdentityError: the list cannot be read, or the folder's `ca.crt` did not sign it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "crl.pem"
        self._ca = folder / "ca.crt"
        self._lock = Lock()
        self._seen: tuple[int, int, int] | None = None
        self._serials: frozenset[int] = frozenset()
        self._refresh()

    def is_revoked(self, certificate: bytes | int) -> bool:
        """Whether a certificate (PEM, DER, or its serial number) is on the list as it is now."""
        serial = certificate if isinstance(certificate, int) else _parse(certificate).serial_number
        with self._lock:
            try:
                self._refresh()
            except IdentityError as error:
                # A broken list must neither admit who was revoked nor end a run of weeks.
                _log.warning("keeping the last good revocation list: %s", error)
            return serial in self._serials

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return
        # `pki.revoke` replaces the file, so the inode tells even where the clock is too coarse.
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            crl = x509.load_pem_x509_crl(self._path.read_bytes())
            authority = x509.load_pem_x509_certificate(self._ca.read_bytes())
        except (OSError, ValueError) as error:
            raise IdentityError(
                f"{self._path} cannot be read: {error}; copy it again from the authority"
            ) from None
        if not crl.is_signature_valid(authority.public_key()):  # type: ignore[arg-type]
            raise IdentityError(
                f"{self._path} was not signed by {self._ca}; copy it again from the authority"
            )
        self._serials = frozenset(entry.serial_number for entry in crl)


@dataclass(frozen=True)
class Identity:
    """A certificate, its key, and the authority that both ends trust."""

    name: str
    """The common name: the site, or `coordinator`."""
    role: Role
    """What the certificate may be used for."""
    folder: Path
    """Where it was read from."""
    expires: datetime
    """When the certificate stops being valid."""
    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path, role: Role = "site") -> Identity:
        """Read and check an identity folder.

        Args:
            folder: holds `ca.crt`, `identity.crt` and `identity.key`.
            role: what it must be good for.

        Raises:
            IdentityError: a file is missing, unreadable, or readable by others; the key does not
                belong to the certificate; the certificate is of another authority, of the other
                role, not yet valid, or expired.
        """
        ca_pem = _read(folder, "ca.crt")
        cert_pem = _read(folder, "identity.crt")
        key_pem = _read_key(folder)
        ca = _parse(ca_pem, folder / "ca.crt")
        certificate = _parse(cert_pem, folder / "identity.crt")
        _check_key(folder, certificate, key_pem)
        _check_issuer(folder, certificate, ca)
        _check_dates(folder / "ca.crt", ca)
        _check_dates(folder / "identity.crt", certificate)
        _check_role(folder, certificate, role)
        return cls(
            name=common_name(certificate),
            role=role,
            folder=folder,
            expires=certificate.not_valid_after_utc,
            ca_pem=ca_pem,
            cert_pem=cert_pem,
            key_pem=key_pem,
        )

    def grpc_server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server that admits only certificates of the run's authority."""
        import grpc

        return grpc.ssl_server_credentials(
            [(self.key_pem, self.cert_pem)],
            root_certificates=self.ca_pem,
            require_client_auth=True,
        )

    def grpc_channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel to the coordinator."""
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=self.ca_pem,
            private_key=self.key_pem,
            certificate_chain=self.cert_pem,
        )

    def ssl_context(self, server: bool) -> ssl.SSLContext:
        """For everything that is not gRPC: uvicorn, httpx, asyncio.

        A server's context refuses whom the folder's `crl.pem` names at this moment; ask
        `revocations` about those who are revoked later.

        Args:
            server: whether it accepts connections; else it opens them.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.ca_pem.decode())
        # The module loads keys from files alone.
        context.load_cert_chain(self.folder / "identity.crt", self.folder / "identity.key")
        crl = self.folder / "crl.pem"
        if server and crl.exists():
            self.revocations()  # The signature first: OpenSSL would only fail each handshake.
            context.load_verify_locations(cafile=crl)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        return context

    def revocations(self) -> RevocationList:
        """The folder's revocation list, which notices changes."""
        return RevocationList(self.folder)


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise IdentityError(
            f"identity file {path} is missing; copy the folder that `fedwan pki` made for this "
            "party, all of it"
        ) from None
    except OSError as error:
        raise IdentityError(
            f"identity file {path} cannot be read: {error.strerror}; "
            "let the service's user own the folder"
        ) from None


def _read_key(folder: Path) -> bytes:
    key = _read(folder, "identity.key")
    path = folder / "identity.key"
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise IdentityError(
            f"private key {path} has mode {mode:04o}, readable by others; run: chmod 600 {path}"
        )
    return key


def _parse(data: bytes, path: Path | None = None) -> x509.Certificate:
    try:
        if data.lstrip().startswith(b"-----BEGIN"):
            return x509.load_pem_x509_certificate(data)
        return x509.load_der_x509_certificate(data)
    except ValueError as error:
        what = "a certificate" if path is None else str(path)
        raise IdentityError(
            f"{what} cannot be parsed: {error}; issue it again: fedwan pki issue SITE"
        ) from None


def _check_key(folder: Path, certificate: x509.Certificate, key_pem: bytes) -> None:
    path = folder / "identity.key"
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise IdentityError(
            f"private key {path} cannot be parsed: {error}; copy the identity folder again"
        ) from None
    if _spki(key.public_key()) != _spki(certificate.public_key()):
        raise IdentityError(
            f"private key {path} does not belong to identity.crt beside it; "
            "copy both from the same identity folder"
        )


def _spki(key: Any) -> bytes:
    data: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return data


def _check_issuer(folder: Path, certificate: x509.Certificate, ca: x509.Certificate) -> None:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise IdentityError(
            f"{folder / 'identity.crt'} was not issued by {folder / 'ca.crt'} (foreign authority); "
            "use the ca.crt and the identity that the same `fedwan pki` folder made"
        ) from None


def _check_dates(path: Path, certificate: x509.Certificate) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends <= now():
        raise IdentityError(
            f"certificate {path} expired on {ends:%Y-%m-%d %H:%M} UTC; "
            "issue a new one: fedwan pki issue SITE (pki init --renew for the coordinator)"
        )
    if begins > now():
        raise IdentityError(
            f"certificate {path} is not valid before {begins:%Y-%m-%d %H:%M} UTC; "
            "set the clock of this machine"
        )


def _check_role(folder: Path, certificate: x509.Certificate, role: Role) -> None:
    path = folder / "identity.crt"
    other: Role = "coordinator" if role == "site" else "site"
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        usage = x509.ExtendedKeyUsage([])
    if usage_of(role) not in usage:
        what = f"a {other}'s" if usage_of(other) in usage else "no fedwan"
        raise IdentityError(f"{path} is {what} certificate; give the folder of a {role}")
    if not common_name(certificate):
        raise IdentityError(f"{path} names nobody; issue it with: fedwan pki issue SITE")
