"""A party's TLS identity: read from its folder, checked before any socket opens, and put to use.

Every connection is mutual TLS 1.2 or newer with the run's own authority; the peer's certificate,
not a field in a message, says which site it is.
"""

from __future__ import annotations

import logging
import socket
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedwan.errors import IdentityError

if TYPE_CHECKING:
    import grpc

_log = logging.getLogger(__name__)

Role = Literal["site", "coordinator"]
"""Who bears an identity: sites open connections, the coordinator accepts them."""
USAGE = {
    "site": ExtendedKeyUsageOID.CLIENT_AUTH,
    "coordinator": ExtendedKeyUsageOID.SERVER_AUTH,
}
"""The one extended key usage that a role's certificate holds."""
TIMEOUT_S = 5.0
GREETING_S = 2.0
_REFUSED = "our certificate is not accepted there"


def now() -> datetime:
    """The present, with its time zone."""
    return datetime.now(UTC)


def common_name(certificate: x509.Certificate) -> str:
    """The party that a certificate stands for; empty if it names none."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


class RevocationList:
    """An identity folder's `crl.pem`, if it has one, read again whenever the file changes.

    An `IdentityError` at first if it cannot be read, or the folder's `ca.crt` did not sign it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "crl.pem"
        self._ca = folder / "ca.crt"
        self._lock = Lock()
        self._seen: tuple[int, int, int] | None = None
        self._serials: frozenset[int] = frozenset()
        self._refresh()

    def is_revoked(self, serial: int) -> bool:
        """Whether a certificate's serial number is on the list as it is now."""
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
    folder: Path
    expires: datetime
    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path, role: Role = "site") -> Identity:
        """Read and check a folder that holds `ca.crt`, `identity.crt` and `identity.key`."""
        pems = [_read(folder / name) for name in ("ca.crt", "identity.crt", "identity.key")]
        ca = _parse(pems[0], folder / "ca.crt")
        certificate = _parse(pems[1], folder / "identity.crt")
        _check_key(folder / "identity.key", pems[2], certificate)
        try:
            certificate.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):
            raise IdentityError(
                f"{folder / 'identity.crt'} was not issued by {folder / 'ca.crt'} (foreign "
                "authority); use the ca.crt and the identity that the same `fedwan pki` folder made"
            ) from None
        _check_dates(folder / "ca.crt", ca)
        _check_dates(folder / "identity.crt", certificate)
        _check_role(folder / "identity.crt", certificate, role)
        expires = certificate.not_valid_after_utc
        return cls(common_name(certificate), role, folder, expires, *pems)

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
        """For everything that is not gRPC; whom `RevocationList` names is not refused by itself."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.ca_pem.decode())
        # The module loads keys from files alone.
        context.load_cert_chain(self.folder / "identity.crt", self.folder / "identity.key")
        return context


def _read(path: Path) -> bytes:
    try:
        data, mode = path.read_bytes(), path.stat().st_mode & 0o777
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
    if path.suffix == ".key" and mode & 0o077:
        raise IdentityError(
            f"private key {path} has mode {mode:04o}, readable by others; run: chmod 600 {path}"
        )
    return data


def _parse(data: bytes, path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise IdentityError(
            f"{path} cannot be parsed: {error}; issue it again: fedwan pki issue SITE"
        ) from None


def _check_key(path: Path, key_pem: bytes, certificate: x509.Certificate) -> None:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise IdentityError(
            f"private key {path} cannot be parsed: {error}; copy the identity folder again"
        ) from None
    if key.public_key() != certificate.public_key():
        raise IdentityError(
            f"private key {path} does not belong to identity.crt beside it; "
            "copy both from the same identity folder"
        )


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


def _check_role(path: Path, certificate: x509.Certificate, role: Role) -> None:
    other: Role = "coordinator" if role == "site" else "site"
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        usage = x509.ExtendedKeyUsage([])
    if USAGE[role] not in usage:
        what = f"a {other}'s" if USAGE[other] in usage else "no fedwan"
        raise IdentityError(f"{path} is {what} certificate; give the folder of a {role}")
    if not common_name(certificate):
        raise IdentityError(f"{path} names nobody; issue it with: fedwan pki issue SITE")


# Why a connection fails ---------------------------------------------------------------------------


def handshake_complaint(address: str, identity: Identity) -> str | None:
    """One line for the user if either side refuses the other's certificate, else None.

    gRPC only says `unavailable`, the TLS library knows more. A refusal is final, so only TLS's own
    words count: a certificate that is not accepted here, or an alert from there. A connection that
    is merely closed may be a coordinator that ends, or the path. A gRPC server closes it, too,
    without an alert, where it refuses a site's certificate. But if its own certificate is accepted
    here, both are of one authority, and only expiry is left.
    """
    reason = _try_handshake(address, identity)
    if reason is None:
        return None
    if identity.expires < now():
        reason += f" (it expired on {identity.expires:%Y-%m-%d %H:%M} UTC)"
    return (
        f"no TLS session with {address}, {reason}; "
        "use an identity folder that this run's authority issued and that has not expired"
    )


def _try_handshake(address: str, identity: Identity) -> str | None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    context = identity.ssl_context(server=False)
    context.set_alpn_protocols(["h2"])  # without it the server would close for that reason
    try:
        with (
            socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname=host) as tls,
        ):
            tls.settimeout(GREETING_S)
            is_closed = not tls.recv(1)
            return _REFUSED if is_closed and identity.expires < now() else None
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted here: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason is None or "ALERT" not in error.reason:
            return None
        return f"{_REFUSED}: " + error.reason.lower().replace("_", " ")
    except OSError:
        return None
