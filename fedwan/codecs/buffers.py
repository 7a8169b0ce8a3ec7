"""Several buffers that read like one."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Buffers", "Bytes"]

Bytes = bytes | bytearray | memoryview


class Buffers:
    """Buffers in a row; none is copied."""

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []
        self._starts: list[int] = []
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all of them together."""
        return self._num_bytes

    def append(self, buffer: Bytes) -> None:
        """Put one behind the others."""
        if len(buffer):
            self._buffers.append(memoryview(buffer).cast("B"))
            self._starts.append(self._num_bytes)
            self._num_bytes += len(buffer)

    def read(self, offset: int, size: int) -> Bytes:
        """`size` bytes from `offset`: a view where one buffer holds them, else a copy."""
        assert 0 <= offset and offset + size <= self._num_bytes
        if not size:
            return b""
        at = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[at]
        view = self._buffers[at][start : start + size]
        if len(view) == size:
            return view
        parts = [view]
        missing = size - len(view)
        while missing:
            at += 1
            parts.append(self._buffers[at][:missing])
            missing -= len(parts[-1])
        return bytearray().join(parts)
