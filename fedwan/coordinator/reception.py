"""A payload on its way in: which chunks are here, and where they lie."""

from __future__ import annotations

import threading
from pathlib import Path

from fedwan.codecs.payload import Bytes, Source
from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer, FileBuffer

__all__ = ["ChunkedReception"]

SPOOL_BYTES = 8 << 20
"""Payloads from this size on are spooled to a file, so that memory does not grow with the sites."""

MIN_CHUNK_BYTES = 1 << 10


class ChunkedReception:
    """Collects the chunks of one payload, in any order, from any number of stripes.

    Args:
        header: what was announced; `num_bytes` was checked against what the fragment needs.
        folder: for payloads too large to hold in memory.
    """

    def __init__(self, header: wire.UploadHeader, folder: Path) -> None:
        if header.chunk_bytes < MIN_CHUNK_BYTES:
            raise PayloadError(
                f"chunks of {header.chunk_bytes} bytes are too small; the least are "
                f"{MIN_CHUNK_BYTES}"
            )
        self.header = header
        self._chunk_bytes = header.chunk_bytes
        num_chunks = -(-header.num_bytes // self._chunk_bytes)
        self._missing = set(range(num_chunks))
        self._writing: set[int] = set()
        self._lock = threading.Lock()
        self._buffer: Buffer | FileBuffer = (
            Buffer(header.num_bytes)
            if header.num_bytes < SPOOL_BYTES
            else FileBuffer(header.num_bytes, folder)
        )
        self._is_claimed = False

    def write(self, offset: int, data: Bytes) -> None:
        """See `fedwan.link.base.Reception`."""
        index, rest = divmod(offset, self._chunk_bytes)
        expected = min(self._chunk_bytes, self.header.num_bytes - offset)
        if rest or len(data) != expected:
            raise PayloadError(
                f"chunk of {len(data)} bytes at {offset} does not fit a payload of "
                f"{self.header.num_bytes} bytes in chunks of {self._chunk_bytes}; refused"
            )
        with self._lock:
            if index not in self._missing:
                return
            # One writer a chunk: a late one must not touch bytes that were checked meanwhile.
            self._missing.discard(index)
            self._writing.add(index)
        try:
            self._buffer.write(offset, data)
        except BaseException:
            with self._lock:
                self._missing.add(index)
            raise
        finally:
            with self._lock:
                self._writing.discard(index)

    def missing(self) -> list[int]:
        """Numbers of the chunks that are not here yet."""
        with self._lock:
            return sorted(self._missing | self._writing)

    def claim(self) -> Source | None:
        """The whole payload, for the first caller after the last chunk; None for all others."""
        with self._lock:
            if self._missing or self._writing or self._is_claimed:
                return None
            self._is_claimed = True
            return self._buffer

    def close(self) -> None:
        """Drop the payload."""
        self._buffer.close()
