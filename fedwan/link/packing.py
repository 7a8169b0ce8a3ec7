"""Chunks made shorter on their way, without loss: the entropy coding that codecs leave to the link.

Codes of a codec are not equally likely: a byte of `int4` holds 5.7 to 6.9 bits of information, one
of `bf16` 6.2, one of `fp32` 7.3 (docs/log.md). Zstandard's Huffman stage (RFC 8878, section 4.2)
takes the difference out of each chunk, at some 0.7 GB/s a core one way and 1.1 the other; on a link
slower than `FAST` that is sooner than sending it. Every chunk is packed by itself, so that a
payload keeps its size, its offsets and its checksum, and a transfer resumes at any chunk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import zstandard

from fedwan.codecs.payload import Bytes
from fedwan.errors import PayloadError
from fedwan.link.framing import Chunk, make_chunk

__all__ = ["PackedOnce", "Packing", "pack", "unpack"]

COMPRESSIONS = ("auto", "zstd", "none")
"""What a link may be told."""
LEVEL = 1
"""Zstandard's lowest that codes entropy; higher ones look longer for repeats that are not there."""
WORTH = 0.97
"""A chunk that stays longer than this share of itself travels as it is."""
FAST = 100e6
"""Bytes of payload a second, from which on packing costs more time than it saves."""
LEAST_BYTES = 8 << 20
"""Shorter transfers measure the round trip."""
KEEP_BYTES = 64 << 20
"""Packed chunks that a coordinator keeps for the other sites, which fetch them about then."""
MOST_SLOTS = 4096
"""Chunks remembered, those among them that packing makes no shorter."""

_local = threading.local()


class Packing:
    """Whether transfers in one direction are packed.

    Args:
        compression: `zstd`, `none`, or `auto`: while the link is slow enough for it to pay.
    """

    def __init__(self, compression: str) -> None:
        assert compression in COMPRESSIONS
        self.is_on = compression != "none"
        self._is_open = compression == "auto"

    def note(self, num_bytes: int, seconds: float) -> None:
        """A transfer of so many bytes of payload, as they are unpacked, took so long."""
        if not self._is_open or num_bytes < LEAST_BYTES:
            return
        # Packed transfers count as faster, so what turns it on again has to be well below.
        self.is_on = num_bytes < seconds * (FAST if self.is_on else FAST / 2)


def pack(offset: int, data: Bytes) -> Chunk:
    """A chunk, packed if that makes it shorter."""
    packed = _packed(data)
    return make_chunk(offset, data) if packed is None else make_chunk(offset, packed, len(data))


def unpack(chunk: Chunk, most_bytes: int) -> Bytes:
    """A chunk's data as it was before it was packed; costs a copy if it was.

    Args:
        chunk: intact, see `is_intact`.
        most_bytes: of data; more than that is not even allocated.

    Raises:
        PayloadError: it is not what its packing claims.
    """
    if not chunk.raw_bytes:
        return chunk.data
    try:
        if chunk.raw_bytes > most_bytes or (
            zstandard.frame_content_size(chunk.data) != chunk.raw_bytes
        ):
            raise PayloadError(
                f"chunk at {chunk.offset} claims {chunk.raw_bytes} bytes where its packing "
                f"or its size says otherwise; refused"
            )
        data: bytes = _decompressor().decompress(chunk.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"chunk at {chunk.offset} cannot be unpacked ({error})") from None
    return data


class PackedOnce:
    """Packs each chunk of a payload once, whoever fetches it; any thread may ask.

    Args:
        keep_bytes: of packed chunks; those asked for least recently are dropped.
    """

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._num_bytes = 0
        self._slots: OrderedDict[tuple[int, int], _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def chunk(self, checksum: int, offset: int, read: Callable[[], Bytes]) -> Chunk:
        """As `pack`.

        Args:
            checksum: of the payload, which tells it from others.
            offset: in the payload.
            read: gives the chunk's data.
        """
        key = checksum, offset
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            self._trim()
        with slot.lock:
            if slot.is_raw:
                return make_chunk(offset, read())
            if slot.chunk is None:
                chunk = pack(offset, read())
                if not chunk.raw_bytes:  # its data is the payload's own: not ours to keep
                    slot.is_raw = True
                    return chunk
                self._keep(key, slot, chunk)
            return slot.chunk or chunk

    def _keep(self, key: tuple[int, int], slot: _Slot, chunk: Chunk) -> None:
        with self._lock:
            if self._slots.get(key) is slot:  # it may have been dropped meanwhile
                slot.chunk = chunk
                self._num_bytes += len(chunk.data)
                self._trim()

    def _trim(self) -> None:
        """With the lock held: drop what was asked for least recently."""
        while len(self._slots) > 1 and (
            self._num_bytes > self._keep_bytes or len(self._slots) > MOST_SLOTS
        ):
            _, oldest = self._slots.popitem(last=False)
            if oldest.chunk is not None:
                self._num_bytes -= len(oldest.chunk.data)


class _Slot:
    """One chunk's place, and who packs it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.chunk: Chunk | None = None
        self.is_raw = False
        """Whether packing it was tried in vain."""


def _packed(data: Bytes) -> bytes | None:
    """None if it is hardly shorter."""
    packed: bytes = _compressor().compress(data)
    return packed if len(packed) < WORTH * len(data) else None


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):  # its tables are a thread's own
        # Checksums are the chunk's and the payload's.
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
