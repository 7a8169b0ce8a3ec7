"""Fetch a payload from the coordinator: striped over channels, resumed where a stream broke."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial

import grpc

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Buffer
from fedwan.link.framing import Chunk, Part, is_intact
from fedwan.link.methods import Stub
from fedwan.link.retry import Patience
from fedwan.link.wiretap import ByteCounter

__all__ = ["download"]


class _Transfer:
    """What has arrived of one payload."""

    def __init__(self, header: wire.DownloadHeader) -> None:
        if not header.chunk_bytes:
            raise PayloadError("a download announces chunks of 0 bytes; refused")
        self.header = header
        self.buffer = Buffer(header.num_bytes)
        self._num_chunks = -(-header.num_bytes // header.chunk_bytes)
        self._received: set[int] = set()

    def store(self, parts: Iterable[Part[wire.DownloadHeader]]) -> bool:
        """Take in a stream; False if the coordinator no longer holds these bytes."""
        for part in parts:
            if part.header is not None and part.header.status != wire.DownloadHeader.READY:
                return False
            if part.chunk is not None:
                self._store_chunk(part.chunk)
        return True

    def _store_chunk(self, chunk: Chunk) -> None:
        data = chunk.data
        if not is_intact(chunk):
            raise PayloadError(f"chunk at {chunk.offset} was damaged on the way; resume the run")
        index, rest = divmod(chunk.offset, self.header.chunk_bytes)
        expected = min(self.header.chunk_bytes, self.header.num_bytes - chunk.offset)
        if rest or len(data) != expected:
            raise PayloadError(
                f"chunk of {len(data)} bytes at {chunk.offset} does not fit a payload of "
                f"{self.header.num_bytes} bytes; refused"
            )
        self.buffer.write(chunk.offset, data)
        self._received.add(index)

    def missing(self) -> list[int]:
        return [index for index in range(self._num_chunks) if index not in self._received]

    def outside_stripe(self, stripes: int) -> list[int]:
        """Chunks that the first stream, stripe 0, does not carry."""
        return [index for index in range(self._num_chunks) if index % stripes]


def download(
    stubs: Sequence[Stub],
    pool: Executor,
    counter: ByteCounter,
    patience: Patience,
    request: wire.DownloadRequest,
) -> Delivery:
    """Fetch what is asked for, or the coordinator's reason why there is none yet.

    Memory: one block of the payload's size.

    Args:
        stubs: one per channel.
        pool: runs the stripes.
        counter: of bytes on the wire.
        patience: how long to try.
        request: what to fetch; `stripes` and `checksum` are filled in here.

    Raises:
        LinkLost, SessionLost, IdentityError, PayloadError: see `Patience.failed`.
    """

    def stream(stub: Stub, wanted: wire.DownloadRequest) -> Iterator[Part[wire.DownloadHeader]]:
        return counter.receiving(stub.Download(counter.sent(wanted)))

    request.stripes = len(stubs)
    transfer: _Transfer | None = None
    while True:
        try:
            if transfer is None:
                parts = stream(stubs[0], request)
                first = next(parts, None)
                if first is None or first.header is None:
                    raise PayloadError("a download began without its header; refused")
                if first.header.status != wire.DownloadHeader.READY:
                    return Delivery(first.header, None)
                transfer = _Transfer(first.header)
                rest = transfer.outside_stripe(len(stubs))
                finish = _start(stubs[1:], pool, transfer, rest, request, stream)
                transfer.store([first])
                is_held = _both(partial(transfer.store, parts), finish)
            else:
                missing = transfer.missing()
                is_held = _start(stubs, pool, transfer, missing, request, stream)()
            patience.succeeded()
            if not is_held:
                transfer = None
            elif not transfer.missing():
                return Delivery(transfer.header, transfer.buffer)
        except grpc.RpcError as error:
            patience.failed(error)


def _both(here: Callable[[], bool], elsewhere: Callable[[], bool]) -> bool:
    """Run a stripe in this thread, then wait for the others, whatever became of the first.

    A stripe still running would go on storing chunks that the next attempt asks for again.
    """
    try:
        is_held = here()
    except Exception:
        with suppress(Exception):
            elsewhere()
        raise
    return elsewhere() and is_held


def _start(
    stubs: Sequence[Stub],
    pool: Executor,
    transfer: _Transfer,
    chunks: Sequence[int],
    request: wire.DownloadRequest,
    stream: Callable[[Stub, wire.DownloadRequest], Iterator[Part[wire.DownloadHeader]]],
) -> Callable[[], bool]:
    """Begin to fetch some chunks; the returned call waits for them, and says if all were held."""

    def fetch(stub: Stub, part: Sequence[int]) -> bool:
        wanted = wire.DownloadRequest()
        wanted.CopyFrom(request)
        wanted.checksum = transfer.header.checksum
        wanted.chunks.extend(part)
        return transfer.store(stream(stub, wanted))

    count = min(len(stubs), len(chunks))
    futures = [
        pool.submit(fetch, stub, chunks[index::count]) for index, stub in enumerate(stubs[:count])
    ]

    def finish() -> bool:
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return all(future.result() for future in futures)

    return finish
