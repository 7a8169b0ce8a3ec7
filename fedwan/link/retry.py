"""What to do about a failed call: try again while patience lasts, or raise what a user can mend."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from fedwan.errors import IdentityError, LinkLost, PayloadError, SessionLost

__all__ = ["Patience"]

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


class Patience:
    """Counts how long a link has been failing; any success starts the count anew.

    Args:
        address: of the other side, for messages.
        patience_s: longest time without a success.
        diagnose: says what a TLS handshake complains about, if it does.
        sleep: waits; a test's clock may differ.
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
        self.num_failures = 0

    def succeeded(self) -> None:
        """Something came through."""
        self._failing_since = None
        self._wait_s = FIRST_WAIT_S

    def failed(self, error: grpc.RpcError) -> None:
        """Wait before the next attempt.

        Raises:
            IdentityError: no attempt can succeed with these certificates.
            SessionLost: the coordinator does not know this session.
            PayloadError: the payload is refused as it is.
            LinkLost: patience ran out.
        """
        self.num_failures += 1
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
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if self._wait_s in (FIRST_WAIT_S, LONGEST_WAIT_S):
            # Again later too: a certificate may expire while the coordinator is away.
            complaint = self._diagnose()
            if complaint:
                raise IdentityError(complaint) from None
        if now - self._failing_since > self._patience_s:
            raise LinkLost(
                f"the coordinator at {self._address} could not be reached for "
                f"{self._patience_s:g} s ({text}); check its address, its service and the "
                "firewall, or raise round.patience_s"
            ) from None
        self._sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
