"""A download on its way in: the chunks that have come, and who fetches which of the others.

Each channel begins with every N-th chunk. One that is done takes over half of what the slowest has
left, so that a connection which loses packets holds up little.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer
from fedwan.link.framing import Chunk, is_intact

__all__ = ["Incoming", "Share", "Shares"]

WORTH = 3.0
"""What is taken over must be this many times as long as asking for it takes."""


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
            PayloadError: it was damaged, or does not lie where a chunk can.
        """
        data = chunk.data
        if not is_intact(chunk):
            raise PayloadError(f"chunk at {chunk.offset} was damaged on the way; resume the run")
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


class Share:
    """Chunks that one call fetches, in the order in which they come."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self.chunks = list(chunks)
        self.num_done = 0
        self.elapsed_s = 0.0
        """From the beginning of the call to its last chunk so far."""
        self.was_cut = False
        """Whether the call asked for more chunks than are left to it."""

    @property
    def num_left(self) -> int:
        """Chunks to come."""
        return len(self.chunks) - self.num_done

    @property
    def left_s(self) -> float:
        """How long they will take, as it goes; endless before the first has come."""
        if not self.num_done:
            return math.inf
        return self.num_left * self.elapsed_s / self.num_done


class Shares:
    """The shares of all channels; any thread may ask.

    Args:
        parts: what each channel begins with.
    """

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._lock = threading.Lock()
        self._shares = [Share(part) for part in parts]
        self._asking_s = math.inf

    def first(self, index: int) -> Share:
        """What channel `index` begins with."""
        with self._lock:
            return self._shares[index]

    def answered(self, asking_s: float) -> None:
        """A call's first chunk came so long after it was asked for."""
        with self._lock:
            self._asking_s = min(self._asking_s, asking_s)

    def arrived(self, share: Share, elapsed_s: float) -> bool:
        """A chunk of a share has come; whether it was its last, although more were asked for."""
        with self._lock:
            share.num_done += 1
            share.elapsed_s = elapsed_s
            return share.was_cut and share.num_left <= 0

    def steal(self) -> Share | None:
        """Half of what the slowest share has left, if that is worth a call of its own."""
        with self._lock:
            divisible = [share for share in self._shares if share.num_left > 1]
            slowest = max(divisible, key=lambda share: share.left_s, default=None)
            if slowest is None or slowest.left_s < WORTH * self._asking_s:
                return None
            half = slowest.num_left // 2
            share = Share(slowest.chunks[-half:])
            del slowest.chunks[-half:]
            slowest.was_cut = True
            self._shares.append(share)
            return share
