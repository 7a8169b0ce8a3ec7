"""Messages that carry a chunk: a fixed prefix, the header, the chunk's bytes (docs/wire.md).

Protobuf's own classes would copy every chunk twice more on either side.

Chunks are packed without loss: a byte of `int4` holds 5.7 to 6.9 bits of information, one of `bf16`
6.2, one of `fp32` 7.3 (docs/log.md). Zstandard's Huffman stage takes the difference out, at some
0.7 GB/s a core one way and 1.1 the other. Each by itself, so that a transfer resumes at any chunk.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

import zstandard
from blake3 import blake3
from google.protobuf.message import DecodeError

from fedwan.codecs.payload import Bytes
from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire

H = TypeVar("H", wire.UploadHeader, wire.DownloadHeader)

LEVEL = 1
"""Zstandard's lowest that codes entropy; higher ones look longer for repeats that are not there."""
WORTH = 0.97
"""A chunk that stays longer than this share of itself travels as it is."""
FAST = 100e6
"""Bytes of payload a second, from which on packing costs more time than it saves."""
MAX_HEADER_BYTES = 256 << 10
"""Under masks it has the shares for all sites; of 63 sites 70 kB."""
LEAST_BYTES = 8 << 20
"""Shorter transfers measure the round trip."""
KEEP_CHUNKS = 64
"""Packed chunks that a coordinator keeps for the other sites, which fetch them about then."""

_HASH_BYTES = 32
_PREFIX = struct.Struct("<IQI")
_local = threading.local()


class Chunk(NamedTuple):
    """A part of a payload, never empty. TLS sees to it that what arrives is what left."""

    offset: int
    data: Bytes
    raw_bytes: int = 0
    """Of the data once unpacked; 0 where it is not packed."""


class Part(NamedTuple, Generic[H]):
    """A message: a header, a chunk, or both."""

    header: H | None
    chunk: Chunk | None


def serialize(part: Part[H]) -> bytes:
    """The message's bytes; copies the chunk once."""
    header = b"" if part.header is None else part.header.SerializeToString()
    offset, data, raw_bytes = part.chunk or (0, b"", 0)
    return b"".join((_PREFIX.pack(len(header), offset, raw_bytes), header, data))


def parser(header_type: Callable[[], H]) -> Callable[[bytes], Part[H]]:
    """What reads messages with this header, or raises `DecodeError`; chunks are views of them."""

    def parse(message: bytes) -> Part[H]:
        if len(message) < _PREFIX.size:
            raise DecodeError(f"a message of {len(message)} bytes is too short")
        header_bytes, offset, raw_bytes = _PREFIX.unpack_from(message)
        begin = _PREFIX.size + header_bytes
        if begin > len(message) or header_bytes > MAX_HEADER_BYTES:
            raise DecodeError(f"a header of {header_bytes} bytes is too long")
        header: H | None = None
        if header_bytes:
            header = header_type()
            header.ParseFromString(message[_PREFIX.size : begin])
        if begin == len(message):
            return Part(header, None)
        return Part(header, Chunk(offset, memoryview(message)[begin:], raw_bytes))

    return parse


class Packing:
    """Whether transfers in one direction are packed: while the link is slow, if at all."""

    def __init__(self, is_allowed: bool = True) -> None:
        self.is_on = self._is_allowed = is_allowed

    def note(self, num_bytes: int, seconds: float) -> None:
        """A transfer of so many bytes of payload, as they are unpacked, took so long."""
        if self._is_allowed and num_bytes >= LEAST_BYTES:
            # Packed transfers count as faster, so what turns it on again has to be well below.
            self.is_on = num_bytes < seconds * (FAST if self.is_on else FAST / 2)


def pack(offset: int, data: Bytes) -> Chunk:
    """A chunk, packed if that makes it shorter."""
    if not hasattr(_local, "compressor"):  # its tables are a thread's own
        # The payload has a checksum.
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    packed: bytes = _local.compressor.compress(data)
    if len(packed) >= WORTH * len(data):
        return Chunk(offset, data)
    return Chunk(offset, packed, len(data))


def unpack(chunk: Chunk, most_bytes: int) -> Bytes:
    """An arrived chunk's data as it was before it was packed; costs a copy if it was.

    A `PayloadError` if it is not what its packing claims, or has more than `most_bytes`, which are
    not even allocated.
    """
    if not chunk.raw_bytes:
        return chunk.data
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        if chunk.raw_bytes > most_bytes or (
            zstandard.frame_content_size(chunk.data) != chunk.raw_bytes
        ):
            raise PayloadError(
                f"chunk at {chunk.offset} claims {chunk.raw_bytes} bytes where its packing "
                f"or its size says otherwise; refused"
            )
        data: bytes = _local.decompressor.decompress(chunk.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"chunk at {chunk.offset} cannot be unpacked ({error})") from None
    return data


class ChunkHashes:
    """What names a payload: BLAKE3 of its chunks' BLAKE3 hashes, in their order.

    A chunk is hashed by the thread that sends it, and by the one that receives it, while others are
    on their way: any thread may add any of them, in any order.
    """

    def __init__(self, num_chunks: int) -> None:
        self._hashes = bytearray(_HASH_BYTES * num_chunks)
        self._is_here = bytearray(num_chunks)

    def add(self, index: int, data: Bytes) -> None:
        """Hash a chunk, which lets other threads go on."""
        begin = _HASH_BYTES * index
        self._hashes[begin : begin + _HASH_BYTES] = blake3(data).digest()
        self._is_here[index] = True

    def missing(self) -> list[int]:
        """Numbers of the chunks that are not hashed yet."""
        return [index for index, is_here in enumerate(self._is_here) if not is_here]

    def payload(self) -> str:
        """What names the whole payload, in hexadecimal."""
        name: str = blake3(self._hashes).hexdigest()
        return name


class PackedOnce:
    """Packs each chunk of a payload once, whoever fetches it; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int], Future[Chunk | None]] = OrderedDict()

    def chunk(self, checksum: int, offset: int, read: Callable[[], Bytes]) -> Chunk:
        """As `pack`, of the data that `read` gives; `checksum` tells the payload from others."""
        key = checksum, offset
        with self._lock:
            is_first = key not in self._chunks
            future = self._chunks.setdefault(key, Future())
            self._chunks.move_to_end(key)
            while len(self._chunks) > KEEP_CHUNKS:
                self._chunks.popitem(last=False)
        if is_first:
            chunk = None
            try:
                chunk = pack(offset, read())
            finally:  # data that is not packed is the payload's own, and not ours to keep
                future.set_result(chunk if chunk and chunk.raw_bytes else None)
            return chunk
        return future.result() or Chunk(offset, read())
