"""A download on its way in: the chunks that have come, each checked and in its place."""

from __future__ import annotations

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer
from fedwan.link.framing import Chunk, is_intact
from fedwan.link.packing import unpack

__all__ = ["Incoming"]


class Incoming:
    """What has arrived of one payload.

    Args:
        header: that announced it.

    Raises:
        PayloadError: no such payload can be.
    """

    def __init__(self, header: wire.DownloadHeader) -> None:
        if not header.chunk_bytes:
            raise PayloadError("a download announces chunks of 0 bytes; refused")
        self.header = header
        self.buffer = Buffer(header.num_bytes)
        self._num_chunks = -(-header.num_bytes // header.chunk_bytes)
        self._received: set[int] = set()

    def store(self, chunk: Chunk) -> None:
        """Put a chunk in its place.

        Raises:
            PayloadError: it was damaged, cannot be unpacked, or does not lie where a chunk can.
        """
        if not is_intact(chunk):
            raise PayloadError(f"chunk at {chunk.offset} was damaged on the way; resume the run")
        data = unpack(chunk, self.header.chunk_bytes)
        index, rest = divmod(chunk.offset, self.header.chunk_bytes)
        expected = min(self.header.chunk_bytes, self.header.num_bytes - chunk.offset)
        if rest or len(data) != expected:
            raise PayloadError(
                f"chunk of {len(data)} bytes at {chunk.offset} does not fit a payload of "
                f"{self.header.num_bytes} bytes; refused"
            )
        self.buffer.write(chunk.offset, data)
        self._received.add(index)

    def missing(self) -> list[int]:
        """Chunks that have not come, in order."""
        return [index for index in range(self._num_chunks) if index not in self._received]
