"""Messages that carry a chunk, read and written without copying the chunk more than once.

On the wire these are `UploadPart` and `DownloadPart` of wire.proto, byte for byte; protobuf's own
classes would copy every chunk twice more on either side. A message that is laid out in another
order, as another implementation may, goes through protobuf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import xxhash
from google.protobuf.message import DecodeError

from fedwan.codecs.payload import Bytes
from fedwan.link import wire_pb2 as wire

__all__ = [
    "Chunk",
    "Part",
    "download_part",
    "is_intact",
    "make_chunk",
    "serialize",
    "upload_part",
]

H = TypeVar("H", wire.UploadHeader, wire.DownloadHeader)

_HEADER_TAG = b"\x0a"
_CHUNK_TAG = b"\x12"
_OFFSET_TAG = b"\x08"
_CHECKSUM_TAG = b"\x11"
_RAW_BYTES_TAG = b"\x18"
_DATA_TAG = b"\x22"


class Chunk(NamedTuple):
    """A part of a payload."""

    offset: int
    checksum: int
    """XXH3-64 of the data."""
    data: Bytes
    raw_bytes: int = 0
    """Of the data once unpacked; 0 where it is not packed, see `fedwan.link.packing`."""


class Part(Generic[H]):
    """A message: a header, a chunk, or both."""

    __slots__ = ("chunk", "header")

    def __init__(self, header: H | None, chunk: Chunk | None) -> None:
        self.header: H | None = header
        self.chunk = chunk

    def ByteSize(self) -> int:  # noqa: N802
        """Serialised size in bytes, under the name that protobuf gives it."""
        size = 0
        if self.header is not None:
            length = self.header.ByteSize()
            size += 1 + len(_varint(length)) + length
        if self.chunk is not None:
            body = len(_chunk_head(self.chunk)) + len(self.chunk.data)
            size += 1 + len(_varint(body)) + body
        return size


def make_chunk(offset: int, data: Bytes, raw_bytes: int = 0) -> Chunk:
    """A chunk with its checksum."""
    return Chunk(offset, xxhash.xxh3_64_intdigest(data), data, raw_bytes)


def is_intact(chunk: Chunk) -> bool:
    """Whether the data is what its checksum says."""
    return xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum


def serialize(part: Part[H]) -> bytes:
    """The message's bytes; copies the chunk once."""
    pieces: list[Bytes] = []
    if part.header is not None:
        header = part.header.SerializeToString()
        pieces += [_HEADER_TAG, _varint(len(header)), header]
    if part.chunk is not None:
        head, data = _chunk_head(part.chunk), part.chunk.data
        pieces += [_CHUNK_TAG, _varint(len(head) + len(data)), head, data]
    return b"".join(pieces)


def _chunk_head(chunk: Chunk) -> bytes:
    """Everything of a chunk before its data; proto3 leaves out fields that are zero."""
    offset, checksum, data, raw_bytes = chunk
    head = b""
    if offset:
        head += _OFFSET_TAG + _varint(offset)
    if checksum:
        head += _CHECKSUM_TAG + checksum.to_bytes(8, "little")
    if raw_bytes:
        head += _RAW_BYTES_TAG + _varint(raw_bytes)
    if len(data):
        head += _DATA_TAG + _varint(len(data))
    return head


def upload_part(data: bytes) -> Part[wire.UploadHeader]:
    """Parse an `UploadPart`; the chunk's data is a view of the message."""
    return _parse(data, wire.UploadHeader, wire.UploadPart.FromString)


def download_part(data: bytes) -> Part[wire.DownloadHeader]:
    """Parse a `DownloadPart`; the chunk's data is a view of the message."""
    return _parse(data, wire.DownloadHeader, wire.DownloadPart.FromString)


def _parse(
    data: bytes,
    header_type: Callable[[], H],
    by_protobuf: Callable[[bytes], wire.UploadPart | wire.DownloadPart],
) -> Part[H]:
    try:
        at = 0
        header: H | None = None
        if data[:1] == _HEADER_TAG:
            length, at = _read_varint(data, 1)
            header = header_type()
            header.ParseFromString(data[at : at + length])
            at += length
        return Part(header, _parse_chunk(data, at))
    except (IndexError, _OtherLayoutError, DecodeError):
        message = by_protobuf(data)
        chunk = message.chunk
        return Part(
            message.header if message.HasField("header") else None,  # type: ignore[arg-type]
            Chunk(chunk.offset, chunk.checksum, chunk.data, chunk.raw_bytes)
            if message.HasField("chunk")
            else None,
        )


def _parse_chunk(data: bytes, at: int) -> Chunk | None:
    if at == len(data):
        return None
    length, at = _expect(data, at, _CHUNK_TAG)
    if at + length != len(data):
        raise _OtherLayoutError
    offset = checksum = raw_bytes = 0
    if data[at : at + 1] == _OFFSET_TAG:
        offset, at = _read_varint(data, at + 1)
    if data[at : at + 1] == _CHECKSUM_TAG:
        checksum = int.from_bytes(data[at + 1 : at + 9], "little")
        at += 9
    if data[at : at + 1] == _RAW_BYTES_TAG:
        raw_bytes, at = _read_varint(data, at + 1)
        if raw_bytes >> 32:
            raise _OtherLayoutError
    if at == len(data):
        return Chunk(offset, checksum, b"", raw_bytes)
    length, at = _expect(data, at, _DATA_TAG)
    if at + length != len(data):
        raise _OtherLayoutError
    return Chunk(offset, checksum, memoryview(data)[at:], raw_bytes)


class _OtherLayoutError(Exception):
    """Valid protobuf perhaps, but not in the order in which we write it."""


def _expect(data: bytes, at: int, tag: bytes) -> tuple[int, int]:
    if data[at : at + 1] != tag:
        raise _OtherLayoutError
    return _read_varint(data, at + 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            if value >> 64:
                raise _OtherLayoutError
            return value, at
        shift += 7
        if shift > 63:
            raise _OtherLayoutError
