"""Bytes of a payload as they arrive: in memory, or in an unlinked file once they are many."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from fedwan.codecs.payload import Bytes
from fedwan.errors import FedwanError, PayloadError
from fedwan.files import on_disk
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import ChunkHashes

H = TypeVar("H", wire.UploadHeader, wire.DownloadHeader)

SPOOL_BYTES = 8 << 20
"""Uploads from this size on are spooled to a file, so that memory does not grow with the sites."""
MIN_CHUNK_BYTES = 1 << 10
MAX_CHUNKS = 1 << 17
"""Of one payload, which takes 10 ms and 10 MB; those of 512 KiB, which sites send, make 64 GiB."""
_DROPPED = "the payload was dropped while it was read; send it again"


class Buffer:
    """A payload in one block of memory; a `PayloadError` where there is none of that size."""

    def __init__(self, num_bytes: int) -> None:
        try:
            # numpy asks for huge pages, which makes the first write three times faster.
            self._data = memoryview(np.zeros(num_bytes, np.uint8).data)
        except (MemoryError, ValueError):
            raise PayloadError(
                f"there is no memory for a payload of {num_bytes} bytes; run the same fedwan "
                "version everywhere, and on a machine that holds the networks"
            ) from None
        self.num_bytes = num_bytes

    def write(self, offset: int, data: Bytes) -> None:
        """Put bytes in their place; a buffer that is closed lets them drop."""
        whole = self._data
        if len(whole) == self.num_bytes:
            # By numpy, which lets other threads go on: Python would halt them all.
            part = np.frombuffer(whole[offset : offset + len(data)], np.uint8)
            np.copyto(part, np.frombuffer(data, np.uint8))

    def read(self, offset: int, size: int) -> Bytes:
        """A writable view, no copy; a `PayloadError` once the buffer is closed."""
        part = self._data[offset : offset + size]
        if len(part) != size:
            raise PayloadError(_DROPPED)
        return part

    def close(self) -> None:
        """Let go of the memory; views of it stay good."""
        self._data = memoryview(b"")


class _Descriptor:
    """Of an open file, until nobody uses it: else it could be another file's during a call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class FileBuffer:
    """A payload in a file that has no name, so that no crash leaves it behind.

    The page cache holds it while it is fresh; it does not count towards the process's memory. The
    first write reserves the space, all of it: a `DiskFull` where there is not enough.
    """

    def __init__(self, num_bytes: int, folder: Path) -> None:
        self.num_bytes = num_bytes
        self._folder = folder
        self._file: _Descriptor | None = None
        self._is_closed = False
        self._making = threading.Lock()
        self._scratch = threading.local()

    def _make(self) -> _Descriptor | None:
        with self._making:
            if self._file is None and not self._is_closed:
                with on_disk(self._folder, self.num_bytes):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                        os.posix_fallocate(file.fileno(), 0, max(1, self.num_bytes))
                        self._file = _Descriptor(os.dup(file.fileno()))
            return self._file

    def write(self, offset: int, data: Bytes) -> None:
        """Put bytes in their place; threads may write at once. Drops them once it is closed."""
        file, view = self._file or self._make(), memoryview(data)
        while file is not None and view:
            written = os.pwrite(file.number, view, offset)
            view, offset = view[written:], offset + written

    def read(self, offset: int, size: int) -> Bytes:
        """A copy of a part, good until this thread reads the next one; as `Buffer.read`."""
        file = self._file
        if file is None:
            raise PayloadError(_DROPPED)
        scratch: memoryview = getattr(self._scratch, "data", memoryview(b""))
        if len(scratch) < size:
            scratch = self._scratch.data = memoryview(np.empty(size, np.uint8).data)
        whole = view = scratch[:size]
        if offset + size == self.num_bytes:  # a pass ends here: keep no block for the next one
            self._scratch.data = memoryview(b"")
        while view:
            count = os.preadv(file.number, [view], offset)
            assert count > 0, "read beyond the end of a spooled payload"
            view, offset = view[count:], offset + count
        return whole

    def close(self) -> None:
        """Give the disk space back, once nobody reads or writes any more."""
        with self._making:
            self._is_closed, self._file = True, None


class Reception(Generic[H]):
    """Collects the chunks of one payload, in any order, from any number of threads.

    An upload has a folder, for a file if it is large, and its chunks are hashed as they come; a
    download is in memory.
    """

    def __init__(self, header: H, folder: Path | None = None) -> None:
        num_bytes = header.num_bytes
        least = max(MIN_CHUNK_BYTES, -(-num_bytes // MAX_CHUNKS))
        if header.chunk_bytes < least:
            raise PayloadError(
                f"chunks of {header.chunk_bytes} bytes are too small for a payload of {num_bytes}; "
                f"send it in chunks of at least {least}"
            )
        self.header: H = header
        self._is_upload = folder is not None
        self._missing = set(range(-(-num_bytes // header.chunk_bytes)))
        self.hashes = ChunkHashes(len(self._missing))
        self._is_begun = bytearray(len(self._missing))
        """Chunks that somebody writes, or has written."""
        self._lock = threading.Lock()
        self._buffer: Buffer | FileBuffer = (
            FileBuffer(num_bytes, folder)
            if folder is not None and num_bytes >= SPOOL_BYTES
            else Buffer(num_bytes)
        )
        self._is_claimed = False
        self.refusal: FedwanError | None = None
        """What the next chunk is answered with, if none is wanted."""

    def write(self, offset: int, data: Bytes) -> None:
        """Store a chunk; a `PayloadError` if none of this payload lies there. May be repeated."""
        chunk_bytes, num_bytes = self.header.chunk_bytes, self.header.num_bytes
        index, rest = divmod(offset, chunk_bytes)
        if not data or rest or len(data) != min(chunk_bytes, num_bytes - offset):
            raise PayloadError(
                f"chunk of {len(data)} bytes at {offset} does not fit a payload of "
                f"{num_bytes} bytes in chunks of {chunk_bytes}; refused"
            )
        if self.refusal is not None:
            raise self.refusal
        with self._lock:
            # One writer a chunk: a late one must not touch bytes that were checked meanwhile.
            if self._is_begun[index]:
                return
            self._is_begun[index] = True
        try:
            self._buffer.write(offset, data)
            if self._is_upload:
                self.hashes.add(index, data)
        except BaseException:
            self._is_begun[index] = False
            raise
        with self._lock:
            self._missing.discard(index)

    def missing(self) -> list[int]:
        """Numbers of the chunks that are not here yet."""
        with self._lock:
            return sorted(self._missing)

    def claim(self) -> Buffer | FileBuffer | None:
        """The whole payload, for the first caller after the last chunk; None for all others."""
        with self._lock:
            if self._missing or self._is_claimed:
                return None
            self._is_claimed = True
            return self._buffer

    def give_back(self) -> None:
        """What was claimed may be claimed again."""
        with self._lock:
            self._is_claimed = False

    def close(self) -> None:
        """Drop the payload."""
        self._buffer.close()


UploadReception = Reception[wire.UploadHeader]
