"""Why there is no TLS session: gRPC only says `unavailable`, the TLS library knows more.

A refusal is final, so only TLS's own words count: a certificate that is not accepted here, or an
alert from there. A connection that is merely closed may be a coordinator that ends, or the path. A
gRPC server closes it, too, without an alert, where it refuses a site's certificate. But if its own
certificate is accepted here, both are of one authority, and only expiry is left as a reason.
"""

from __future__ import annotations

import socket
import ssl

from fedwan.link.certificates import now
from fedwan.link.tls import Identity

__all__ = ["handshake_complaint"]

TIMEOUT_S = 5.0
GREETING_S = 2.0

_CLOSED = "closed"


def handshake_complaint(address: str, identity: Identity) -> str | None:
    """Try a TLS handshake with a site's identity.

    Args:
        address: `host:port` of the coordinator.
        identity: the site's.

    Returns:
        One line for the user if either side refuses the other's certificate; None if the handshake
        succeeds, or if the address cannot be reached at all.
    """
    reason = _try(address, identity)
    if reason == _CLOSED:
        reason = "our certificate is not accepted there" if identity.expires < now() else None
    if reason is None:
        return None
    if identity.expires < now():
        reason += f" (it expired on {identity.expires:%Y-%m-%d %H:%M} UTC)"
    return (
        f"no TLS session with {address}, {reason}; "
        "use an identity folder that this run's authority issued and that has not expired"
    )


def _try(address: str, identity: Identity) -> str | None:
    """What is wrong with one handshake, if it is about certificates."""
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
            return None if tls.recv(1) else _CLOSED
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted here: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason is None or "ALERT" not in error.reason:
            return None
        return "our certificate is not accepted there: " + error.reason.lower().replace("_", " ")
    except OSError:
        return None
