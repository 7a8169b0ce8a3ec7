"""Bytes of a payload as they arrive: in memory, or in an unlinked file once they are many."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import numpy as np

from fedwan.codecs.payload import Bytes
from fedwan.errors import PayloadError

__all__ = ["Buffer", "FileBuffer"]


class Buffer:
    """A payload in one block of memory."""

    def __init__(self, num_bytes: int) -> None:
        # numpy asks for huge pages, which makes the first write three times faster.
        self._data = memoryview(np.zeros(num_bytes, np.uint8).data)
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """Length of the payload."""
        return self._num_bytes

    def write(self, offset: int, data: Bytes) -> None:
        """Put bytes in their place; a buffer that is closed lets them drop."""
        whole = self._data
        if len(whole) == self._num_bytes:
            whole[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> Bytes:
        """A writable view, no copy.

        Raises:
            PayloadError: the buffer is closed.
        """
        part = self._data[offset : offset + size]
        if len(part) != size:
            raise PayloadError("the payload was dropped while it was read; send it again")
        return part

    def close(self) -> None:
        """Let go of the memory; views of it stay good."""
        self._data = memoryview(b"")


class FileBuffer:
    """A payload in a file that has no name, so that no crash leaves it behind.

    The page cache holds it while it is fresh; it does not count towards the process's memory.

    Args:
        num_bytes: length of the payload; the space is reserved at once.
        folder: where the file lies; a disk with room for a payload per site.

    Raises:
        OSError: the disk is full.
    """

    def __init__(self, num_bytes: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._num_bytes = num_bytes
        self._scratch = threading.local()
        self._lock = threading.Lock()
        self._is_open = True
        self._num_users = 1  # this object, until `close`; then whoever is still at it
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(1, num_bytes))
        except OSError:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Length of the payload."""
        return self._num_bytes

    def write(self, offset: int, data: Bytes) -> None:
        """Put bytes in their place; threads may write at the same time.

        A buffer that is closed lets them drop.
        """
        if not self._enter():
            return
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        finally:
            self._leave()

    def read(self, offset: int, size: int) -> Bytes:
        """A copy of a part, good until this thread reads the next one.

        Raises:
            PayloadError: the buffer is closed.
        """
        if not self._enter():
            raise PayloadError("the payload was dropped while it was read; send it again")
        try:
            scratch: memoryview = getattr(self._scratch, "data", memoryview(b""))
            if len(scratch) < size:
                scratch = self._scratch.data = memoryview(np.empty(size, np.uint8).data)
            whole = scratch[:size]
            if offset + size == self._num_bytes:  # a pass ends here: keep no block for the next one
                self._scratch.data = memoryview(b"")
            view = whole
            while view:
                count = os.preadv(self._file.fileno(), [view], offset)
                assert count > 0, "read beyond the end of a spooled payload"
                view, offset = view[count:], offset + count
            return whole
        finally:
            self._leave()

    def close(self) -> None:
        """Give the disk space back, once nobody reads or writes any more."""
        with self._lock:
            is_open, self._is_open = self._is_open, False
        if is_open:
            self._leave()

    def _enter(self) -> bool:
        # A descriptor closed under a running call could be another file's by then.
        with self._lock:
            self._num_users += self._is_open
            return self._is_open

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            self._file.close()
