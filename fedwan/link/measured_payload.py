"""The payloads of `fedwan doctor link`: noise that the coordinator takes and drops, or sends.

They pass through the same calls, stripes and checks as contributions and updates, outside of any
run. `fedwan.link.measure` is the other end.
"""

from __future__ import annotations

import random
from functools import cache

from fedwan.codecs.payload import Bytes
from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery

__all__ = ["MAX_BYTES", "Discard", "Noise", "noise_delivery"]

MAX_BYTES = 256 << 20
"""Of one payload, which bounds the site's memory."""
CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 22


@cache
def _block() -> memoryview:
    return memoryview(random.Random(0).randbytes(_BLOCK_BYTES + CHUNK_BYTES))


class Noise:
    """A payload that cannot be packed: one block of noise again and again."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, offset: int, size: int) -> Bytes:
        """A view of the block."""
        at = offset % _BLOCK_BYTES
        return _block()[at : at + size]


class Discard:
    """A reception that keeps nothing."""

    def write(self, offset: int, data: Bytes) -> None:
        """Drop a chunk, whose checksum was right."""


def noise_delivery(request: wire.DownloadRequest, congestion: str) -> Delivery:
    """The answer to a download of kind MEASUREMENT.

    Args:
        request: its version is the number of bytes.
        congestion: control of the connections that carry it.

    Raises:
        PayloadError: too many bytes.
    """
    if not 0 < request.version <= MAX_BYTES:
        raise PayloadError(f"a measurement of {request.version} bytes; ask for 1 to {MAX_BYTES}")
    header = wire.DownloadHeader(
        num_bytes=request.version, chunk_bytes=CHUNK_BYTES, congestion=congestion
    )
    return Delivery(header, Noise(request.version))
