"""Messages that carry a chunk: a fixed prefix, the header as protobuf, the chunk's bytes.

    4 bytes   length of the header, 0 for none        all numbers little endian
    8 bytes   offset of the chunk in the payload
    8 bytes   XXH3-64 of the chunk's bytes
    4 bytes   their number once unpacked; 0 where they are not packed
    …         the header, a protobuf message
    …         the chunk's bytes; none where the message is a header alone

Protobuf's own classes would copy every chunk twice more on either side.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import xxhash
from google.protobuf.message import DecodeError

from fedwan.codecs.payload import Bytes
from fedwan.link import wire_pb2 as wire

__all__ = ["Chunk", "Part", "is_intact", "make_chunk", "parser", "serialize"]

H = TypeVar("H", wire.UploadHeader, wire.DownloadHeader)

_PREFIX = struct.Struct("<IQQI")


class Chunk(NamedTuple):
    """A part of a payload, never empty."""

    offset: int
    checksum: int
    """XXH3-64 of the data."""
    data: Bytes
    raw_bytes: int = 0
    """Of the data once unpacked; 0 where it is not packed, as `fedwan.link.packing` does."""


class Part(Generic[H]):
    """A message: a header, a chunk, or both."""

    __slots__ = ("chunk", "header")

    def __init__(self, header: H | None, chunk: Chunk | None) -> None:
        self.header: H | None = header
        self.chunk = chunk

    def ByteSize(self) -> int:  # noqa: N802
        """Serialised size in bytes, under the name that protobuf gives it."""
        header = 0 if self.header is None else self.header.ByteSize()
        return _PREFIX.size + header + (0 if self.chunk is None else len(self.chunk.data))


def make_chunk(offset: int, data: Bytes, raw_bytes: int = 0) -> Chunk:
    """A chunk with its checksum."""
    return Chunk(offset, xxhash.xxh3_64_intdigest(data), data, raw_bytes)


def is_intact(chunk: Chunk) -> bool:
    """Whether the data is what its checksum says."""
    return xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum


def serialize(part: Part[H]) -> bytes:
    """The message's bytes; copies the chunk once."""
    header = b"" if part.header is None else part.header.SerializeToString()
    offset, checksum, data, raw_bytes = part.chunk or (0, 0, b"", 0)
    return b"".join((_PREFIX.pack(len(header), offset, checksum, raw_bytes), header, data))


def parser(header_type: Callable[[], H]) -> Callable[[bytes], Part[H]]:
    """What reads messages with this header; a chunk's data is a view of the message.

    It raises `DecodeError` for bytes that are no such message.
    """

    def parse(message: bytes) -> Part[H]:
        if len(message) < _PREFIX.size:
            raise DecodeError(f"a message of {len(message)} bytes is too short")
        header_bytes, offset, checksum, raw_bytes = _PREFIX.unpack_from(message)
        begin = _PREFIX.size + header_bytes
        if begin > len(message):
            raise DecodeError(f"a header of {header_bytes} bytes is longer than its message")
        header: H | None = None
        if header_bytes:
            header = header_type()
            header.ParseFromString(message[_PREFIX.size : begin])
        if begin == len(message):
            return Part(header, None)
        return Part(header, Chunk(offset, checksum, memoryview(message)[begin:], raw_bytes))

    return parse
