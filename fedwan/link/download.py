"""Fetch a payload from the coordinator: striped over channels, resumed where a stream broke."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import grpc

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Buffer
from fedwan.link.channels import Direction
from fedwan.link.framing import Chunk, Part, is_intact
from fedwan.link.methods import Stub
from fedwan.link.packing import unpack
from fedwan.link.retry import Patience

__all__ = ["download"]

Parts = Iterator[Part[wire.DownloadHeader]]


def download(down: Direction, patience: Patience, request: wire.DownloadRequest) -> Delivery:
    """Fetch what is asked for, or the coordinator's reason why there is none yet.

    Memory: one block of the payload's size.

    Args:
        down: the direction.
        patience: how long to try.
        request: what to fetch; `transfer`, `packed`, `chunks` and `checksum` are filled in here.

    Raises:
        LinkLost, SessionLost, IdentityError, PayloadError: as `Patience.failed` does.
    """
    incoming: Incoming | None = None
    began = 0.0
    stubs = down.pool.stubs()
    while True:
        try:
            if incoming is None:
                wanted = _ask(request, None, down)
                parts = _stream(stubs[0], down, wanted)
                first, header = _header(parts)
                if header.status != wire.DownloadHeader.READY:
                    return Delivery(header, None)
                # What was waited for before the payload existed is no part of its transfer.
                began = time.monotonic()
                incoming = Incoming(header)
                wanted.checksum = header.checksum
                num_others = len(incoming.missing()) - 1
                finish = _start(stubs[1:], num_others, down, wanted, incoming)
                _store([first], incoming)
                is_held = _both(partial(_store, parts, incoming), finish)
            else:
                wanted, num = _ask(request, incoming, down), len(incoming.missing())
                is_held = _start(stubs, num, down, wanted, incoming)()
            patience.succeeded()
            if not is_held:
                incoming = None
            elif not incoming.missing():
                down.packing.note(incoming.header.num_bytes, time.monotonic() - began)
                return Delivery(incoming.header, incoming.buffer)
        except grpc.RpcError as error:
            patience.failed(error)


class Incoming:
    """What has arrived of one payload.

    Args:
        header: that announced it.

    Raises:
        PayloadError: no such payload can be.
    """

    def __init__(self, header: wire.DownloadHeader) -> None:
        if not header.chunk_bytes:
            raise PayloadError("a download announces chunks of 0 bytes; refused")
        self.header = header
        self.buffer = Buffer(header.num_bytes)
        self._num_chunks = -(-header.num_bytes // header.chunk_bytes)
        self._received: set[int] = set()

    def store(self, chunk: Chunk) -> None:
        """Put a chunk in its place.

        Raises:
            PayloadError: it was damaged, cannot be unpacked, or does not lie where a chunk can.
        """
        if not is_intact(chunk):
            raise PayloadError(f"chunk at {chunk.offset} was damaged on the way; resume the run")
        data = unpack(chunk, self.header.chunk_bytes)
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
        """Chunks that have not come, in order."""
        return [index for index in range(self._num_chunks) if index not in self._received]


def _ask(
    request: wire.DownloadRequest, incoming: Incoming | None, down: Direction
) -> wire.DownloadRequest:
    """The request of a new transfer, for everything or for what is still missing."""
    wanted = wire.DownloadRequest()
    wanted.CopyFrom(request)
    wanted.transfer = secrets.randbits(63) + 1
    wanted.packed = down.packing.is_on
    if incoming is not None:
        wanted.checksum = incoming.header.checksum
        wanted.chunks.extend(incoming.missing())
    return wanted


def _stream(stub: Stub, down: Direction, wanted: wire.DownloadRequest) -> Parts:
    return down.counter.receiving(stub.Download(down.counter.sent(wanted)))


def _header(parts: Parts) -> tuple[Part[wire.DownloadHeader], wire.DownloadHeader]:
    """The first message, and the header in it."""
    first = next(parts, None)
    if first is None or first.header is None:
        raise PayloadError("a download began without its header; refused")
    return first, first.header


def _store(parts: Iterable[Part[wire.DownloadHeader]], incoming: Incoming) -> bool:
    """Take in a stream; False if the coordinator no longer holds these bytes."""
    for part in parts:
        if part.header is not None and part.header.status != wire.DownloadHeader.READY:
            return False
        if part.chunk is not None:
            incoming.store(part.chunk)
    return True


def _start(
    stubs: Sequence[Stub],
    most: int,
    down: Direction,
    wanted: wire.DownloadRequest,
    incoming: Incoming,
) -> Callable[[], bool]:
    """Begin to fetch a transfer's chunks; the returned call waits, and says if all were held.

    Args:
        stubs: one per channel.
        most: channels at most, since there are no more chunks.
        down: the direction.
        wanted: the request, the same on every channel.
        incoming: where chunks go.
    """

    def fetch(stub: Stub) -> bool:
        return _store(_stream(stub, down, wanted), incoming)

    futures = [down.threads.submit(fetch, stub) for stub in stubs[: max(0, most)]]

    def finish() -> bool:
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return all(future.result() for future in futures)

    return finish


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
