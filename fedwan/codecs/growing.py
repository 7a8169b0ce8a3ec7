"""A payload that can be sent while it is still being encoded.

Sizes of records are known before any tensor is, so the header and the table can be written first;
records follow as they are coded, and the checksum ends it. Byte for byte it is the payload that
`Codec.encode` makes.
"""

from __future__ import annotations

import secrets
import threading

import xxhash

from fedwan.codecs.buffers import Buffers, Bytes
from fedwan.codecs.payload import make_trailer, padding
from fedwan.errors import FedwanError

__all__ = ["GrowingPayload"]


class GrowingPayload:
    """A `Source` whose readers wait for bytes that are not coded yet.

    One thread encodes, see `Codec.encode_into`; any number of others read.

    Args:
        head: header and table.
        num_bytes: of the whole payload.
    """

    def __init__(self, head: bytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.checksum = secrets.randbits(64) | 1
        """Tells two attempts at a transfer apart. Random: the trailer is known only at the end."""
        self._buffers = Buffers()
        self._digest = xxhash.xxh3_64()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._put(head)

    def _put(self, *parts: Bytes) -> None:
        for part in parts:
            self._digest.update(part)
        with self._changed:
            for part in parts:
                self._buffers.append(part)
            assert self._buffers.num_bytes <= self.num_bytes, "a record is longer than was said"
            self._changed.notify_all()

    def append(self, record: Bytes) -> None:
        """The next record; it must not change any more."""
        self._put(record, bytes(padding(len(record))))

    def finish(self) -> None:
        """All records are there."""
        self._put(make_trailer(self._digest))
        assert self._buffers.num_bytes == self.num_bytes, "records are missing"

    def fail(self, error: BaseException) -> None:
        """There will be no more records; whoever waits for them is told why."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def read(self, offset: int, size: int) -> Bytes:
        """As `Payload.read`, once these bytes are coded.

        Raises:
            FedwanError: they never will be, since encoding failed.
        """
        assert 0 <= offset and offset + size <= self.num_bytes
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or offset + size <= self._buffers.num_bytes
            )
            if offset + size <= self._buffers.num_bytes:
                return self._buffers.read(offset, size)
            raise FedwanError(
                f"the payload could not be encoded ({type(self._error).__name__}: {self._error}); "
                "nothing was merged, the site's own log says more"
            ) from self._error
