"""A party's TLS identity: read from its folder, checked before any socket opens, and put to use.

Every connection is mutual TLS 1.2 or newer with the run's own authority; the peer's certificate,
not a field in a message, says which site it is.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedwan.config import host_and_port
from fedwan.errors import IdentityError

if TYPE_CHECKING:
    import grpc

Role = Literal["site", "coordinator"]
"""Who bears an identity: sites open connections, the coordinator accepts them."""
USAGE = {
    "site": ExtendedKeyUsageOID.CLIENT_AUTH,
    "coordinator": ExtendedKeyUsageOID.SERVER_AUTH,
}
"""The one extended key usage that a role's certificate holds."""
TIMEOUT_S = 5.0
GREETING_S = 2.0
_GRPC = "h2"
_REFUSED = "our certificate is not accepted there"
_NOT_ACCEPTED = "its certificate is not accepted here"


def now() -> datetime:
    """The present, with its time zone."""
    return datetime.now(UTC)


def common_name(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """The party that a certificate or a request is for; empty if it names none."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


@dataclass(frozen=True)
class Identity:
    """A certificate, its key, and the authorities that are trusted."""

    name: str
    """The common name: the site, or `coordinator`."""
    role: Role
    folder: Path
    expires: datetime
    ca_pem: bytes
    """Authorities: one, or a company's."""
    cert_pem: bytes
    """The certificate, and those between it and its authority, if any."""
    key_pem: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path, role: Role = "site", name: str | None = None) -> Identity:
        """Read and check a folder that holds `ca.crt`, `identity.crt` and `identity.key`.

        `name`: whose it must be, if given.

        Any X.509 authority may have signed it, with certificates between it and its root or none.
        """
        pems = [read_file(folder / name) for name in FILES]
        authorities = parse_file(pems[0], folder / "ca.crt")
        certificate, *between = parse_file(pems[1], folder / "identity.crt")
        _check_key(folder / "identity.key", pems[2], certificate)
        ca = _issuer_of(certificate, between, authorities)
        if ca is None:
            raise IdentityError(
                f"{folder / 'identity.crt'} was not signed by {folder / 'ca.crt'} (foreign "
                "authority); copy both from the same folder of `fedwan pki`"
            )
        _check_dates(folder / "ca.crt", ca)
        _check_dates(folder / "identity.crt", certificate)
        _check_role(folder / "identity.crt", certificate, role)
        owner = common_name(certificate)
        if name not in (None, owner):
            raise IdentityError(
                f"the certificate in {folder} is of {owner!r} and not of {name!r}; give the folder "
                f"that was issued to {name!r}"
            )
        expires = certificate.not_valid_after_utc
        return cls(owner, role, folder, expires, *pems)

    def grpc_channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel to the coordinator."""
        import grpc

        return grpc.ssl_channel_credentials(self.ca_pem, self.key_pem, self.cert_pem)

    def ssl_context(self, server: bool) -> ssl.SSLContext:
        """For everything that is not gRPC; whom `Admission` objects to is not refused by itself."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        self.load_into(context)
        return context

    @cached_property
    def _key(self) -> object:
        return serialization.load_pem_private_key(self.key_pem, password=None)

    def sign(self, data: bytes) -> bytes:
        """By the key; `verify` and `has_signed` are what others do with it."""
        key = self._key
        if isinstance(key, rsa.RSAPrivateKey):
            return key.sign(data, padding.PKCS1v15(), hashes.SHA256())
        assert isinstance(key, ec.EllipticCurvePrivateKey), "TLS has taken it"
        return key.sign(data, ec.ECDSA(hashes.SHA256()))

    def verify(self, name: str, cert_pem: bytes, signature: bytes, data: bytes) -> None:
        """Another site's signature, by a certificate of an authority that is trusted here.

        Now: a second authority may have come since this was loaded.
        """
        path, pem = self.folder / "ca.crt", self.ca_pem
        with suppress(IdentityError):
            pem = read_file(path)
        authorities = parse_file(pem, path)
        certificate = read_certificate(name, "site", cert_pem, authorities)
        _check_dates(_shown(name), certificate)
        if not has_signed(certificate, signature, data):
            raise IdentityError(f"{_shown(name)} does not vouch for what {name} is said to send")

    def load_into(self, context: ssl.SSLContext) -> None:
        """Show this certificate from the next handshake on, and trust its authorities, too."""
        context.load_verify_locations(cadata=self.ca_pem.decode())
        if sys.platform != "linux":
            context.load_cert_chain(self.folder / "identity.crt", self.folder / "identity.key")
            return
        # The module loads keys from files alone, and those of the folder may be others by now.
        with open(os.memfd_create("identity"), "wb", buffering=0) as file:
            file.write(self.cert_pem + b"\n" + self.key_pem)
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


FILES = ("ca.crt", "identity.crt", "identity.key")
"""What every identity folder holds."""


def read_file(path: Path) -> bytes:
    """A file of an identity's folder; an `IdentityError` if it cannot be read safely."""
    try:
        data, mode = path.read_bytes(), path.stat().st_mode & 0o777
    except FileNotFoundError:
        raise IdentityError(
            f"identity file {path} is missing; the key is made here by `fedwan pki request`, and "
            "`fedwan pki sign` makes the others at the authority: copy them here"
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


def parse_file(data: bytes, path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file, or an `IdentityError`."""
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise IdentityError(
            f"{path} cannot be read as PEM; copy it again from the authority"
        ) from None


def read_certificate(
    name: str, role: Role, cert_pem: bytes, authorities: Sequence[x509.Certificate] | None
) -> x509.Certificate:
    """The certificate of a site or of the coordinator, with those between it and its authority.

    An `IdentityError` if it is another's, or of none of these authorities, if there are any given.
    Whether it has expired is not looked at.
    """
    certificate, *between = parse_file(cert_pem, _shown(name))
    if role == "site" and common_name(certificate) != name:
        raise IdentityError(f"{_shown(name)} is {common_name(certificate)}'s")
    if authorities is not None and not _issuer_of(certificate, between, authorities):
        raise IdentityError(f"{_shown(name)} is of no authority that is trusted here")
    _check_role(_shown(name), certificate, role)
    return certificate


def has_signed(certificate: x509.Certificate, signature: bytes, data: bytes) -> bool:
    """Whether a signature is by the key of a certificate; see `Identity.sign`."""
    key = certificate.public_key()
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        else:
            return False  # no key that TLS takes here
    except InvalidSignature:
        return False
    return True


def _shown(name: str) -> Path:
    return Path(f"the certificate of {name}")


def _issuer_of(
    certificate: x509.Certificate,
    between: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
) -> x509.Certificate | None:
    """The authority at the end of a certificate's chain; None if it ends before."""
    for issuer in (*authorities, *between):
        if has_issued(issuer, certificate):
            if issuer in authorities:
                return issuer
            if _may_sign(issuer):
                return _issuer_of(issuer, [c for c in between if c != issuer], authorities)
    return None


def has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether a certificate is by this key; another authority may have its name."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _may_sign(certificate: x509.Certificate) -> bool:
    """Whether it is an authority's; a signature alone does not tell."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _check_key(path: Path, key_pem: bytes, certificate: x509.Certificate) -> None:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        raise IdentityError(
            f"private key {path} cannot be read as PEM; delete it, and make another: "
            "fedwan pki request NAME"
        ) from None
    if key.public_key() != certificate.public_key():
        raise IdentityError(
            f"private key {path} does not belong to identity.crt beside it; have the "
            "identity.csr beside it signed: fedwan pki sign identity.csr"
        )


def _check_dates(path: Path, certificate: x509.Certificate) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends <= now():
        raise IdentityError(
            f"certificate {path} expired on {ends:%Y-%m-%d %H:%M} UTC; "
            "have it renewed at the authority: fedwan pki renew NAME"
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
        raise IdentityError(f"{path} names nobody; it needs a common name")


# Why a connection fails ---------------------------------------------------------------------------


def handshake_complaint(address: str, identity: Identity) -> str | None:
    """One line for the user if either side refuses the other's certificate, else None.

    gRPC only says `unavailable`, the TLS library knows more. A refusal may be final, so only TLS's
    own words count: a certificate that is not accepted here, or an alert from there. A connection
    that is merely closed may be a coordinator that ends, or the path. A gRPC server closes it, too,
    without an alert, where it refuses a site's certificate. But if its own certificate is accepted
    here, both are of one authority, and only expiry is left.
    """
    reason = _try_handshake(address, identity)
    if reason is None:
        return None
    if identity.expires < now():
        reason += f" (it expired on {identity.expires:%Y-%m-%d %H:%M} UTC)"
    mend = "use an identity that this run's authority has signed and that has not expired"
    if reason.startswith(_NOT_ACCEPTED) and reason.endswith("has expired"):
        mend = "whoever runs the coordinator has to renew it: fedwan pki renew coordinator"
    elif reason.endswith("not yet valid"):
        mend = "set the clock of this machine, or the coordinator's"
    return f"no TLS session with {address}, {reason}; {mend}"


def is_data_plane(address: str, identity: Identity) -> bool:
    """Whether the coordinator's data plane listens there: a gRPC server with its certificate."""
    try:
        with _session(address, identity) as tls:
            return tls.selected_alpn_protocol() == _GRPC
    except OSError:
        return False


@contextmanager
def _session(address: str, identity: Identity) -> Iterator[ssl.SSLSocket]:
    host, port = host_and_port(address)
    context = identity.ssl_context(server=False)
    context.set_alpn_protocols([_GRPC])  # without it the server would close for that reason
    with (
        socket.create_connection((host, port), timeout=TIMEOUT_S) as raw,
        context.wrap_socket(raw, server_hostname=host) as tls,
    ):
        yield tls


def _try_handshake(address: str, identity: Identity) -> str | None:
    try:
        with _session(address, identity) as tls:
            tls.settimeout(GREETING_S)
            is_closed = not tls.recv(1)
            return _REFUSED if is_closed and identity.expires < now() else None
    except ssl.SSLCertVerificationError as error:
        return f"{_NOT_ACCEPTED}: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason is None or "ALERT" not in error.reason:
            return None
        return f"{_REFUSED}: " + error.reason.lower().replace("_", " ")
    except OSError:
        return None
