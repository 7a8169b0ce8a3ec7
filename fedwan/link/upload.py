"""Bring a payload to the coordinator: striped over channels, resumed where a stream broke."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import grpc

from fedwan.codecs.payload import Source
from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import Part, make_chunk
from fedwan.link.methods import Stub
from fedwan.link.retry import Patience
from fedwan.link.wiretap import ByteCounter

__all__ = ["upload"]

RECHECK_S = 0.05


def upload(
    stubs: Sequence[Stub],
    pool: Executor,
    counter: ByteCounter,
    patience: Patience,
    header: wire.UploadHeader,
    payload: Source,
) -> wire.Receipt:
    """Send until the coordinator's receipt is final.

    One chunk per stripe is in memory at a time; the payload itself is only read.

    Args:
        stubs: one per channel.
        pool: runs the stripes.
        counter: of bytes on the wire.
        patience: how long to try.
        header: complete but for nothing; its `chunk_bytes` cuts the payload.
        payload: what to send.

    Raises:
        LinkLost, SessionLost, IdentityError, PayloadError: see `Patience.failed`.
    """
    missing: Sequence[int] = range(-(-payload.num_bytes // header.chunk_bytes))
    while True:
        try:
            receipts = _send_stripes(stubs, pool, counter, header, payload, missing)
            patience.succeeded()
        except grpc.RpcError as error:
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
    pool: Executor,
    counter: ByteCounter,
    header: wire.UploadHeader,
    payload: Source,
    chunks: Sequence[int],
) -> list[wire.Receipt]:
    """A receipt per stripe. Stripes that end before the last one are told INCOMPLETE."""

    def send(stub: Stub, part: Sequence[int]) -> wire.Receipt:
        receipt: wire.Receipt = stub.Upload(counter.sending(_parts(header, payload, part)))
        return counter.received(receipt)

    count = min(len(stubs), len(chunks))
    if count <= 1:
        return [send(stubs[0], chunks)]
    futures = [
        pool.submit(send, stub, chunks[index::count]) for index, stub in enumerate(stubs[:count])
    ]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _parts(
    header: wire.UploadHeader, payload: Source, chunks: Sequence[int]
) -> Iterator[Part[wire.UploadHeader]]:
    """The messages of one stripe; the first carries the header, and comes even without chunks."""
    size = header.chunk_bytes
    first: wire.UploadHeader | None = header
    for index in chunks:
        offset = index * size
        data = payload.read(offset, min(size, payload.num_bytes - offset))
        yield Part(first, make_chunk(offset, data))
        first = None
    if first is not None:
        yield Part(first, None)
