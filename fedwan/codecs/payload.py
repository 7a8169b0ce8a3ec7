"""The bytes of an encoded payload: self-describing, versioned, checksummed (docs/wire.md).

A header, a table with an entry for each tensor, the records in table order, each padded to 8 bytes,
and an XXH3-64 of all that. Sizes of records are known before any tensor is, so
a payload can be sent while it is still being encoded, and a reader compares the table with the one
that it expects: it parses nothing and allocates nothing by it.
"""

from __future__ import annotations

import secrets
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from fedwan.errors import FedwanError, PayloadError, UserError
from fedwan.state import Layout, TensorSpec

Bytes = bytes | bytearray | memoryview

RAW = 0
MAGIC = b"FWPL"
VERSION = 1
_HEADER = struct.Struct("<4sB3xII")
_TRAILER = struct.Struct("<Q")
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32),
    *(torch.uint8, torch.bool, torch.int16, torch.int8),
)
"""A tensor's entry has its dtype's place here."""


class Source(Protocol):
    """Random access to the bytes of a payload, in memory or in a file."""

    @property
    def num_bytes(self) -> int:
        """Length of the payload."""

    def read(self, offset: int, size: int) -> Bytes:
        """Exactly `size` bytes from `offset`; the caller stays inside `num_bytes`.

        They are good until the same thread reads again. Writable buffers save the reader a copy:
        torch takes no other.
        """


class Entry(NamedTuple):
    """A tensor in a payload's table."""

    name: str
    encoding: int
    spec: TensorSpec
    num_bytes: int
    """Of its record."""


class Payload:
    """A payload as a row of buffers, none copied; a `Source` that may still grow.

    One thread encodes, any number of others read, and wait for what is not coded yet.

    `num_bytes` is that of the whole, where more is to come than `buffers`.
    """

    def __init__(self, buffers: Iterable[Bytes], num_bytes: int | None = None) -> None:
        self._buffers: list[memoryview] = []
        self._starts: list[int] = []
        self._num_present = 0
        self._digest = xxhash.xxh3_64()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        for buffer in buffers:
            self._put(buffer)
        self.num_bytes: int = self._num_present if num_bytes is None else num_bytes
        self.checksum = self.digest() if num_bytes is None else secrets.randbits(64) | 1
        """Tells two attempts at a transfer apart."""

    def _put(self, buffer: Bytes) -> None:
        self._digest.update(buffer)
        if not len(buffer):
            return
        with self._changed:
            self._buffers.append(memoryview(buffer).cast("B"))
            self._starts.append(self._num_present)
            self._num_present += len(buffer)
            self._changed.notify_all()

    def append(self, *record: Bytes) -> None:
        """The next record, in one part or several; they must not change any more."""
        for part in record:
            self._put(part)
        self._put(bytes(_padding(sum(map(len, record)))))

    def finish(self) -> None:
        """All records are there."""
        if self._num_present + _TRAILER.size != self.num_bytes:
            error = AssertionError("records are not as long as was said")
            self.fail(error)  # who reads must not wait for ever
            raise error
        self._put(_TRAILER.pack(self.digest()))

    def digest(self) -> int:
        """XXH3-64 of what is there."""
        return self._digest.intdigest()

    def fail(self, error: BaseException) -> None:
        """There will be no more records; whoever waits for them is told why."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def read(self, offset: int, size: int) -> Bytes:
        """A view where one buffer holds these bytes, else a copy; waits until they are coded.

        A `FedwanError` if they never will be, since encoding failed.
        """
        end = offset + size
        assert 0 <= offset and end <= self.num_bytes
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or end <= self._num_present)
            if end > self._num_present:
                raise FedwanError(
                    f"the payload could not be encoded ({type(self._error).__name__}: "
                    f"{self._error}); nothing was merged, the site's own log says more"
                ) from self._error
        parts: list[memoryview] = []
        at = bisect_right(self._starts, offset) - 1
        while offset < end:
            begin = offset - self._starts[at]
            parts.append(self._buffers[at][begin : begin + end - offset])
            offset += len(parts[-1])
            at += 1
        return parts[0] if len(parts) == 1 else bytearray().join(parts)


def _padding(size: int) -> int:
    return -size % 8


def tensor_from_bytes(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tensor_bytes`; shares the memory of a writable buffer, else copies it."""
    if len(data) == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    view = memoryview(data)
    writable = bytearray(view) if view.readonly else view
    if dtype is torch.bool:  # any other byte than 0 and 1 would be undefined behaviour
        return torch.frombuffer(writable, dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(writable, dtype=dtype).reshape(shape)


def check_travels(layout: Layout) -> None:
    """Refuse tensors of dtypes that no entry stands for."""
    for name, spec in layout.items():
        if spec.dtype not in _DTYPES:
            raise UserError(
                f"tensor {name!r} is {spec.dtype}, which cannot travel; keep it in another dtype "
                "(of complex numbers as torch.view_as_real), or register a buffer with "
                "persistent=False"
            )


def _pack_entry(entry: Entry) -> bytes:
    name, encoding, spec, num_bytes = entry
    check_travels({name: spec})
    encoded, num_dims = name.encode(), len(spec.shape)
    numbers = (encoding, _DTYPES.index(spec.dtype), num_dims, *spec.shape, num_bytes)
    return struct.pack("<H", len(encoded)) + encoded + struct.pack(f"<BBB{num_dims}IQ", *numbers)


def make_head(entries: Sequence[Entry]) -> bytes:
    """A payload's first bytes, up to its first record."""
    table = b"".join(map(_pack_entry, entries))
    head = _HEADER.pack(MAGIC, VERSION, len(entries), len(table)) + table
    return head + bytes(_padding(len(head)))


def framed_bytes(entries: Sequence[Entry]) -> int:
    """Length of the payload with such a table."""
    body = sum(entry.num_bytes + _padding(entry.num_bytes) for entry in entries)
    return len(make_head(entries)) + body + _TRAILER.size


def read_records(source: Source, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Bytes]]:
    """Each record in order, good until the next one is taken, of a payload with this table.

    A `PayloadError` before the first, if the table or the length differs, or after the last, if the
    checksum does: nothing may be committed before the iterator is exhausted.
    """
    offset = _check_head(source, entries)
    digest = xxhash.xxh3_64(source.read(0, offset))
    for entry in entries:
        size = entry.num_bytes + _padding(entry.num_bytes)
        data = source.read(offset, size)
        digest.update(data)
        offset += size
        yield entry, memoryview(data)[: entry.num_bytes]
    found = digest.intdigest()
    (expected,) = _TRAILER.unpack(source.read(offset, _TRAILER.size))
    if found != expected:
        raise PayloadError(
            f"payload's checksum is {found:016x}, expected {expected:016x}; "
            "it was damaged on the way"
        )


def _check_head(source: Source, entries: Sequence[Entry]) -> int:
    """The offset of the first record."""
    total = source.num_bytes
    if total < _HEADER.size + _TRAILER.size:
        raise PayloadError(f"payload has {total} bytes, fewer than its header; send it again")
    head = make_head(entries)
    seen = bytes(source.read(0, min(len(head), total)))
    if seen[:8] != head[:8]:
        raise PayloadError(
            f"payload begins with {seen[:4]!r} version {seen[4]}, not {MAGIC!r} version {VERSION}; "
            "install the same fedwan on both sides"
        )
    if seen != head:
        raise PayloadError(
            f"payload's table is not that of the {len(entries)} tensors expected; start every site "
            "from the same app and config, with the same codecs"
        )
    if total != (expected := framed_bytes(entries)):
        raise PayloadError(f"payload has {total} bytes, expected {expected}: truncated or padded")
    return len(head)
