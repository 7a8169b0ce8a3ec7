"""Bring a payload to the coordinator: striped over channels, resumed where a stream broke."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import grpc

from fedwan.codecs.payload import Bytes, Source
from fedwan.link import wire_pb2 as wire
from fedwan.link.channels import Direction
from fedwan.link.framing import Part, make_chunk
from fedwan.link.methods import Stub
from fedwan.link.packing import pack
from fedwan.link.retry import Patience
from fedwan.link.scheduler import ChunkQueue

__all__ = ["upload"]

T = TypeVar("T")

RECHECK_S = 0.05


class _Remembering:
    """A source that keeps the error of a read: gRPC tells only that an iterator failed."""

    def __init__(self, inner: Source) -> None:
        self._inner = inner
        self.num_bytes = inner.num_bytes
        self.error: Exception | None = None

    def read(self, offset: int, size: int) -> Bytes:
        try:
            return self._inner.read(offset, size)
        except Exception as error:
            self.error = error
            raise


def upload(
    up: Direction, patience: Patience, header: wire.UploadHeader, payload: Source
) -> wire.Receipt:
    """Send until the coordinator's receipt is final.

    One chunk per stripe is in memory at a time, packed and not; the payload itself is only read.

    Args:
        up: the direction.
        patience: how long to try.
        header: complete but for nothing; its `chunk_bytes` cuts the payload.
        payload: what to send.

    Raises:
        LinkLost, SessionLost, IdentityError, PayloadError: as `Patience.failed` does.
        FedwanError: the payload cannot be read, as when encoding it failed.
    """
    began = time.monotonic()
    receipt = _send_until_final(up.pool.stubs(), up, patience, header, payload)
    up.packing.note(payload.num_bytes, time.monotonic() - began)
    return receipt


def _send_until_final(
    stubs: Sequence[Stub],
    up: Direction,
    patience: Patience,
    header: wire.UploadHeader,
    payload: Source,
) -> wire.Receipt:
    payload = _Remembering(payload)
    missing: Sequence[int] = range(-(-payload.num_bytes // header.chunk_bytes))
    while True:
        try:
            receipts = _send_stripes(stubs, up, header, payload, missing)
            patience.succeeded()
        except grpc.RpcError as error:
            if payload.error is not None:
                raise payload.error from None
            patience.failed(error)
            missing = ()  # a header alone asks what has arrived
            continue
        final = [r for r in receipts if r.status != wire.Receipt.INCOMPLETE]
        if final:
            return final[0]
        if not missing and not receipts[0].missing:
            time.sleep(RECHECK_S)  # whole, and still being checked for a stream that broke
        missing = receipts[0].missing if not missing else ()


def _send_stripes(
    stubs: Sequence[Stub],
    up: Direction,
    header: wire.UploadHeader,
    payload: Source,
    chunks: Sequence[int],
) -> list[wire.Receipt]:
    """A receipt per stripe. Stripes that end before the last one are told INCOMPLETE.

    Chunks wait for those of uploads that began before; a question does not.
    """

    def send(stub: Stub, shared: Iterable[int]) -> wire.Receipt:
        parts = up.counter.sending(_parts(header, payload, shared, up.packing.is_on))
        receipt: wire.Receipt = stub.Upload(_tell_second(parts, up))
        if len(chunks) <= len(stubs):
            up.on_connected()  # there may have been no second message
        return up.counter.received(receipt)

    if not chunks:
        return [send(stubs[0], ())]
    shared = ChunkQueue(chunks)
    with up.queue.first() as key:
        count = min(len(stubs), len(chunks))
        if count == 1:
            return [send(stubs[0], up.queue.following(key, shared))]
        futures = [
            up.threads.submit(send, stub, up.queue.following(key, shared)) for stub in stubs[:count]
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _tell_second(parts: Iterator[T], up: Direction) -> Iterator[T]:
    """The same; gRPC asks for the second message when it has sent the first: it is connected."""
    for number, part in enumerate(parts):
        if number == 1:
            up.on_connected()
        yield part


def _parts(
    header: wire.UploadHeader, payload: Source, chunks: Iterable[int], is_packed: bool
) -> Iterator[Part[wire.UploadHeader]]:
    """The messages of one stripe; the first carries the header, and comes even without chunks."""
    size = header.chunk_bytes
    make = pack if is_packed else make_chunk
    first: wire.UploadHeader | None = header
    for index in chunks:
        offset = index * size
        data = payload.read(offset, min(size, payload.num_bytes - offset))
        yield Part(first, make(offset, data))
        first = None
    if first is not None:
        yield Part(first, None)
