"""Why there is no TLS session: gRPC only says `unavailable`, the TLS library knows."""

from __future__ import annotations

import socket
import ssl

from fedwan.link.tls import Identity

__all__ = ["handshake_complaint"]

TIMEOUT_S = 5.0


def handshake_complaint(address: str, identity: Identity) -> str | None:
    """Try one TLS handshake with a site's identity.

    Args:
        address: `host:port` of the coordinator.
        identity: the site's.

    Returns:
        One line for the user if either side refuses the other's certificate; None if the handshake
        succeeds, or if the address cannot be reached at all.
    """
    host, _, port = address.rpartition(":")
    context = identity.ssl_context(server=False)
    try:
        with (
            socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname=host) as tls,
        ):
            tls.settimeout(0.5)
            tls.recv(1)  # TLS 1.3 refuses a client's certificate only after its handshake
    except ssl.SSLCertVerificationError as error:
        reason = f"its certificate is not accepted here: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason is None or "ALERT" not in error.reason:
            return None
        reason = "our certificate is not accepted there: " + error.reason.lower().replace("_", " ")
    except OSError:
        return None
    else:
        return None
    return (
        f"no TLS session with {address}, {reason}; "
        "use an identity folder that this run's authority issued and that has not expired"
    )
