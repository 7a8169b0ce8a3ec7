"""What to do about a failed call: try again while patience lasts, or raise what a user can mend."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

import grpc

from fedwan.errors import IdentityError, LinkLost, PayloadError, SessionLost
from fedwan.link.tls import Identity, now

_PASSING = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0
MAX_DAMAGED = 3
TIMEOUT_S = 5.0
GREETING_S = 2.0
_REFUSED = "our certificate is not accepted there"


class Patience:
    """Counts how long a link has been failing; any success starts the count anew.

    `diagnose` says what a TLS handshake complains about, if it does.
    """

    def __init__(
        self,
        address: str,
        patience_s: float,
        diagnose: Callable[[], str | None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._address = address
        self._patience_s = patience_s
        self._diagnose = diagnose
        self._sleep = sleep
        self._failing_since: float | None = None
        self._wait_s = FIRST_WAIT_S
        self._damaged = 0

    def succeeded(self) -> None:
        """Something came through."""
        self._failing_since = None
        self._wait_s = FIRST_WAIT_S

    def failed(self, error: grpc.RpcError) -> None:
        """Wait before the next attempt, or raise what no attempt can mend; else `LinkLost`."""
        code, text = error.code(), str(error.details())
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise IdentityError(text) from None
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise SessionLost(text) from None
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            self._damaged += 1
            if "damaged" not in text or self._damaged > MAX_DAMAGED:
                raise PayloadError(text) from None
        elif code not in _PASSING:
            raise LinkLost(f"the coordinator at {self._address} answers {code.name}: {text}")
        now_s = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now_s
        if self._wait_s in (FIRST_WAIT_S, LONGEST_WAIT_S):
            # Again later too: a certificate may expire while the coordinator is away.
            complaint = self._diagnose()
            if complaint:
                raise IdentityError(complaint) from None
        if now_s - self._failing_since > self._patience_s:
            raise LinkLost(
                f"the coordinator at {self._address} could not be reached for "
                f"{self._patience_s:g} s ({text}); check its address, its service and the "
                "firewall, or raise round.patience_s"
            ) from None
        self._sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)


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
