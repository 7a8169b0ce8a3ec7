"""Counts the bytes of every message: serialised size plus gRPC's 5-byte prefix.

What HTTP/2, TLS and TCP add is not counted: below 0.5 % for payloads in chunks of 1 MiB.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

__all__ = ["ByteCounter"]

PREFIX_BYTES = 5


class _Message(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802


M = TypeVar("M", bound=_Message)


class ByteCounter:
    """Bytes up and down; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.up = 0
        self.down = 0

    def sent(self, message: M) -> M:
        """Count a message on its way out."""
        size = message.ByteSize() + PREFIX_BYTES
        with self._lock:
            self.up += size
        return message

    def received(self, message: M) -> M:
        """Count a message that came in."""
        size = message.ByteSize() + PREFIX_BYTES
        with self._lock:
            self.down += size
        return message

    def sending(self, messages: Iterable[M]) -> Iterator[M]:
        """Count each message as it is taken."""
        return (self.sent(message) for message in messages)

    def receiving(self, messages: Iterable[M]) -> Iterator[M]:
        """Count each message as it comes."""
        return (self.received(message) for message in messages)
