"""The bytes of an encoded payload: self-describing, versioned, checksummed (docs/wire.md).

    offset  size  field (all integers little-endian)
    0       4     magic, b"FWPL"
    4       1     layout version, 1
    5       3     zero
    8       4     number of tensors
    12      4     bytes of the table
    16      …     table, one entry per tensor:
                    u16 name bytes, name (UTF-8), u8 encoding, u8 dtype, u8 dimensions,
                    u32 per dimension, u64 record bytes
    …       …     zeros up to a multiple of 8
    …       …     records in table order, each followed by zeros up to a multiple of 8
    end-8   8     XXH3-64 of every byte before it

Encodings: 0 raw (the dtype's own bytes); each codec has its own from 1 on. Nothing here
is unpickled or executed; a reader knows the layout it expects and refuses anything else before it
allocates.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from fedwan.codecs.buffers import Buffers, Bytes
from fedwan.errors import PayloadError
from fedwan.state import Layout, Role, TensorSpec

__all__ = [
    "RAW",
    "Bytes",
    "Entry",
    "Payload",
    "Record",
    "Source",
    "build",
    "framed_bytes",
    "make_head",
    "make_trailer",
    "padding",
    "read_records",
    "read_table",
    "tensor_bytes",
    "tensor_from_bytes",
]

RAW = 0
MAGIC = b"FWPL"
VERSION = 1
MAX_TENSORS = 1 << 20
MAX_TABLE_BYTES = 1 << 28
_HEADER = struct.Struct("<4sB3xII")
_TRAILER = struct.Struct("<Q")
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int8,
)


class Source(Protocol):
    """Random access to the bytes of a payload, in memory or in a file."""

    @property
    def num_bytes(self) -> int:
        """Length of the payload."""
        ...

    def read(self, offset: int, size: int) -> Bytes:
        """Exactly `size` bytes from `offset`; the caller stays inside `num_bytes`.

        They are good until the same thread reads again. Writable buffers save the reader a copy:
        torch takes no other.
        """
        ...


class Record(NamedTuple):
    """One encoded tensor, before framing."""

    name: str
    encoding: int
    spec: TensorSpec
    data: memoryview


class Entry(NamedTuple):
    """Where a tensor's record lies in a payload."""

    name: str
    encoding: int
    spec: TensorSpec
    offset: int
    num_bytes: int


class Payload:
    """An encoded payload as a list of buffers; fp32 records share memory with their tensors.

    Args:
        buffers: what it is made of, in order.
        checksum: XXH3-64 of all but the trailer; tells two attempts at a transfer apart.
    """

    def __init__(self, buffers: Iterable[Bytes], checksum: int) -> None:
        self.checksum = checksum
        self._buffers = Buffers()
        for buffer in buffers:
            self._buffers.append(buffer)

    @property
    def num_bytes(self) -> int:
        """Length of the payload."""
        return self._buffers.num_bytes

    def read(self, offset: int, size: int) -> Bytes:
        """`size` bytes from `offset`: a view where one buffer holds them, else a copy."""
        return self._buffers.read(offset, size)


def padding(size: int) -> int:
    """Zeros behind so many bytes, up to a multiple of 8."""
    return -size % 8


def tensor_bytes(value: Tensor) -> memoryview:
    """A tensor's bytes in memory order, sharing its memory (a GPU's are copied to the host)."""
    flat = value.detach().contiguous().cpu().reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def tensor_from_bytes(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tensor_bytes`; shares the memory of a writable buffer, else copies it."""
    if len(data) == 0:
        return torch.empty(shape, dtype=dtype)
    view = memoryview(data)
    writable = bytearray(view) if view.readonly else view
    if dtype is torch.bool:  # any other byte than 0 and 1 would be undefined behaviour
        return torch.frombuffer(writable, dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(writable, dtype=dtype).reshape(shape)


def make_head(rows: Iterable[tuple[str, int, TensorSpec, int]]) -> bytes:
    """A payload's first bytes, up to its first record, of (name, encoding, spec, record bytes)."""
    table = bytearray()
    count = 0
    for name, encoding, spec, num_bytes in rows:
        if spec.dtype not in _DTYPES:
            raise ValueError(
                f"tensor {name!r} is {spec.dtype}, which cannot travel; "
                "keep it in another dtype, or register it with persistent=False"
            )
        encoded = name.encode()
        table += struct.pack("<H", len(encoded)) + encoded
        dtype, num_dims = _DTYPES.index(spec.dtype), len(spec.shape)
        table += struct.pack(f"<BBB{num_dims}IQ", encoding, dtype, num_dims, *spec.shape, num_bytes)
        count += 1
    head = _HEADER.pack(MAGIC, VERSION, count, len(table)) + bytes(table)
    return head + bytes(padding(len(head)))


def make_trailer(digest: xxhash.xxh3_64) -> bytes:
    """A payload's last bytes."""
    return _TRAILER.pack(digest.intdigest())


def build(records: Iterable[Record]) -> Payload:
    """Frame records as a payload. Costs one hashing pass; record bytes are not copied."""
    parts = list(records)
    head = make_head((r.name, r.encoding, r.spec, len(r.data)) for r in parts)
    body = [b for r in parts for b in (r.data, bytes(padding(len(r.data))))]
    digest = xxhash.xxh3_64(head)
    for part in body:
        digest.update(part)
    return Payload([head, *body, make_trailer(digest)], digest.intdigest())


def framed_bytes(records: Iterable[tuple[str, TensorSpec, int]]) -> int:
    """Length of the payload that `build` makes of records, given as (name, spec, record bytes)."""
    head = _HEADER.size
    body = 0
    for name, spec, size in records:
        head += 2 + len(name.encode()) + 3 + 4 * len(spec.shape) + 8
        body += size + padding(size)
    return head + padding(head) + body + _TRAILER.size


def read_table(source: Source, layout: Layout, encodings: Set[int]) -> tuple[list[Entry], int]:
    """Parse and check a payload's table against the layout that its reader expects.

    Args:
        source: the payload.
        layout: the tensors it must hold, no fewer and no more.
        encodings: encodings that its reader accepts.

    Returns:
        The entries in payload order, and the offset at which records begin.

    Raises:
        PayloadError: anything differs; nothing of the size that the payload claims was allocated.
    """
    total = source.num_bytes
    if total < _HEADER.size + _TRAILER.size:
        raise PayloadError(f"payload has {total} bytes, fewer than its header; send it again")
    magic, version, count, table_bytes = _HEADER.unpack(source.read(0, _HEADER.size))
    if magic != MAGIC or version != VERSION:
        raise PayloadError(
            f"payload begins with {bytes(magic)!r} version {version}, not {MAGIC!r} version "
            f"{VERSION}; install the same fedwan on both sides"
        )
    if count > MAX_TENSORS or table_bytes > min(MAX_TABLE_BYTES, total - _HEADER.size):
        raise PayloadError(
            f"payload claims {count} tensors in a table of {table_bytes} bytes; refused"
        )
    if count != len(layout):
        raise PayloadError(f"payload holds {count} tensors, expected {len(layout)}; refused")
    table = bytes(source.read(_HEADER.size, table_bytes))
    offset = _HEADER.size + table_bytes
    offset += padding(offset)
    first = offset
    entries: list[Entry] = []
    for name, encoding, spec, size in _parse_entries(table, count):
        expected = layout.get(name)
        if expected is None or (spec.shape, spec.dtype) != (expected.shape, expected.dtype):
            raise PayloadError(
                f"payload holds {name[:99]!r} as {spec.dtype} {spec.shape[:9]}, expected "
                f"{expected and (expected.dtype, expected.shape)}; "
                "start every site from the same app and config"
            )
        if encoding not in encodings:
            raise PayloadError(
                f"tensor {name!r} is in encoding {encoding}, expected one of {sorted(encodings)}; "
                "set the same codec on both sides"
            )
        entries.append(Entry(name, encoding, expected, offset, size))
        offset += size + padding(size)
    if len({entry.name for entry in entries}) != count:
        raise PayloadError("payload names a tensor twice; refused")
    if offset + _TRAILER.size != total:
        raise PayloadError(
            f"payload has {total} bytes where its table adds up to {offset + _TRAILER.size}; "
            "it is truncated or padded"
        )
    return entries, first


def _parse_entries(table: bytes, count: int) -> Iterator[tuple[str, int, TensorSpec, int]]:
    at = 0
    try:
        for _ in range(count):
            (length,) = struct.unpack_from("<H", table, at)
            name = table[at + 2 : at + 2 + length].decode()
            at += 2 + length
            encoding, dtype, dims = struct.unpack_from("<BBB", table, at)
            *shape, size = struct.unpack_from(f"<{dims}IQ", table, at + 3)
            at += 3 + 4 * dims + 8
            yield name, encoding, TensorSpec(tuple(shape), _DTYPES[dtype], Role.PARAMETER), size
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise PayloadError(f"payload's table is broken ({error}); refused") from None
    if at != len(table):
        raise PayloadError(f"payload's table has {len(table) - at} stray bytes; refused")


def read_records(
    source: Source, layout: Layout, encodings: Set[int]
) -> Iterator[tuple[Entry, Bytes]]:
    """Each record in order, one in memory at a time, checking the checksum on the way.

    A record is good until the next one is taken.

    Raises:
        PayloadError: as `read_table`, or, after the last record, the checksum does not match. So
            nothing may be committed before the iterator is exhausted.
    """
    entries, first = read_table(source, layout, encodings)
    digest = xxhash.xxh3_64(source.read(0, first))
    for entry in entries:
        data = source.read(entry.offset, entry.num_bytes + padding(entry.num_bytes))
        digest.update(data)
        yield entry, memoryview(data)[: entry.num_bytes]
    (expected,) = _TRAILER.unpack(source.read(source.num_bytes - _TRAILER.size, _TRAILER.size))
    if digest.intdigest() != expected:
        raise PayloadError(
            f"payload's checksum is {digest.intdigest():016x}, expected {expected:016x}; "
            "it was damaged on the way"
        )
