"""Transfers: their order, and a site's end of them, striped and resumed where a stream broke.

Transfers of one site in one direction go one after the other (`TransferQueue`): side by side they
would all end late, while the other direction stands idle. The chunks of one transfer go to
whichever channel has room: with fixed shares the slowest channel would decide.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeVar, cast

import grpc

from fedwan.codecs.payload import Bytes, Source
from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Reception
from fedwan.link.framing import Chunk, ChunkHashes, Packing, Part, pack, unpack
from fedwan.link.rpc import Patience, Stub, Watched, messages, watch
from fedwan.link.tls import Identity
from fedwan.protocol.evidence import statement_of

T = TypeVar("T")
CHECKED_S = 0.05
"""Between the first two questions whether a whole payload has been checked."""
READY = wire.DownloadHeader.READY
WAKE_S = 1.0
MAX_REMEMBERED = 64
"""Transfers of a queue that no call is of any more."""


@dataclass
class Transfer:
    """What is left of one."""

    rest: Iterator[int]
    """Chunks that nobody has taken."""
    num_calls: int = 0
    is_over: bool = False


class TransferQueue:
    """Transfers, first come, first served; the chunks of each go once, to whichever call asks.

    A transfer is over when its last chunk is handed over, not when it has arrived: the next one's
    chunks follow close behind. It is remembered for a while: a call that comes late has nothing
    left to do. Any thread may call.
    """

    def __init__(self) -> None:
        self._transfers: dict[Hashable, Transfer] = {}
        self._changed = threading.Condition()

    def enter(self, key: Hashable, chunks: Iterable[int]) -> Transfer:
        """A call begins: of the transfer with this key, or of one with these chunks, now last."""
        with self._changed:
            transfer = self._transfers.setdefault(key, Transfer(iter(chunks)))
            transfer.num_calls += 1
            idle = [key for key, found in self._transfers.items() if not found.num_calls]
            for old in idle[:-MAX_REMEMBERED]:
                del self._transfers[old]
            return transfer

    def leave(self, transfer: Transfer) -> None:
        """A call ends; a transfer that has none keeps nobody waiting."""
        with self._changed:
            transfer.num_calls -= 1
            self._changed.notify_all()

    def wait(self, transfer: Transfer, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Until it is first, over, or no longer wanted, which is asked now and then."""
        with self._changed:
            while not (transfer.is_over or self._first() is transfer) and is_wanted():
                self._changed.wait(WAKE_S)

    def _first(self) -> Transfer | None:
        found = (t for t in self._transfers.values() if t.num_calls and not t.is_over)
        return next(found, None)

    def chunks(self, transfer: Transfer) -> Iterator[int]:
        """The share of a call that has waited."""
        while True:
            with self._changed:
                if (chunk := next(transfer.rest, None)) is None:
                    transfer.is_over = True
                    self._changed.notify_all()
                    return
            yield chunk


@dataclass(frozen=True)
class Direction:
    """A site's transfers up, or down; neither takes threads from the other."""

    stubs: Sequence[Stub]
    """One for each channel."""
    threads: ThreadPoolExecutor
    """They run stripes."""
    packing: Packing
    on_connected: Callable[[], object]
    """Called when a stripe's connection is known to stand."""
    queue: TransferQueue = field(default_factory=TransferQueue)


# Up ----------------------------------------------------------------------------------------------


def upload(
    up: Direction, patience: Patience, header: wire.UploadHeader, payload: Source
) -> wire.Receipt:
    """Send until the coordinator's receipt is final; errors are `Patience.failed`'s, or a read's.

    One chunk per stripe is in memory at a time, packed and not; the payload itself is only read.
    """
    began = time.monotonic()
    sender, pause_s = _Sender(up, header, payload), CHECKED_S
    missing: Sequence[int] = range(-(-payload.num_bytes // header.chunk_bytes))
    while True:
        try:
            receipts = sender.send(missing)
            patience.succeeded()
        except grpc.RpcError as error:
            if sender.error is not None:
                raise sender.error from None
            patience.failed(error)
            missing = ()  # a header alone asks what has arrived
            continue
        for receipt in receipts:
            if receipt.status != wire.Receipt.INCOMPLETE:
                up.packing.note(payload.num_bytes, time.monotonic() - began)
                return receipt
        if not missing and not receipts[0].missing:
            sender.read_rest()
            time.sleep(pause_s)  # whole, and still being checked for a stream that broke
            pause_s = min(2 * pause_s, WAKE_S)
        missing = receipts[0].missing if not missing else ()


class _Sender:
    """One payload on its way out."""

    def __init__(self, up: Direction, header: wire.UploadHeader, payload: Source) -> None:
        self._up = up
        self._header = header
        self._payload = payload
        self._hashes = ChunkHashes(-(-payload.num_bytes // header.chunk_bytes))
        self._is_signed = header.kind == wire.UploadHeader.CONTRIBUTION
        self.error: Exception | None = None
        """Of a read of the payload: gRPC tells only that an iterator failed."""

    def send(self, chunks: Sequence[int]) -> list[wire.Receipt]:
        """A receipt per stripe. Stripes that end before the last one are told INCOMPLETE.

        Chunks wait for those of uploads that began before; a question does not.
        """
        stubs, queue = self._up.stubs[: len(chunks)], self._up.queue
        if not stubs:
            return [self._send_stripe(self._up.stubs[0], ())]
        transfer = queue.enter(object(), chunks)
        try:
            queue.wait(transfer)
            calls = [partial(self._send_stripe, stub, queue.chunks(transfer)) for stub in stubs]
            receipts = _side_by_side(self._up.threads, calls)
        finally:
            queue.leave(transfer)
        if len(chunks) <= len(stubs):
            self._up.on_connected()  # there may have been no second message
        return receipts

    def read_rest(self) -> None:
        """Hash what a predecessor of this process has sent, so that it can be signed."""
        for index in self._hashes.missing() if self._is_signed else ():
            self._read(index)

    def _send_stripe(self, stub: Stub, chunks: Iterable[int]) -> wire.Receipt:
        with watch(stub.address) as watched:
            parts = self._parts(chunks, stub.identity, watched)
            receipt = watched.result(stub.Upload.future(parts))
        return cast(wire.Receipt, receipt)

    def _parts(
        self, chunks: Iterable[int], identity: Identity, watched: Watched
    ) -> Iterator[Part[wire.UploadHeader]]:
        """The messages of one stripe; the first has the header, and comes even without chunks.

        The last one has the signature, once all chunks are hashed.
        """
        make, is_question = pack if self._up.packing.is_on else Chunk, chunks == ()
        num_sent = 0
        for index in chunks:
            data = self._read(index, watched)
            if num_sent == 1:  # gRPC asks for the second message when it has sent the first
                self._up.on_connected()
            offset = index * self._header.chunk_bytes
            yield Part(None if num_sent else self._header, make(offset, data))
            num_sent += 1
        if not num_sent:
            yield Part(self._header, None)
        if not self._is_signed:
            return
        left = self._hashes.missing()
        for index in () if is_question else left:  # that other stripes are about to read
            self._read(index, watched)
        if not (is_question and left):
            said = statement_of(self._header, identity.name, self._hashes.payload())
            yield Part(wire.UploadHeader(signature=identity.sign(said)), None)

    def _read(self, index: int, watched: Watched | None = None) -> Bytes:
        """A chunk, and hash it."""
        offset, size = index * self._header.chunk_bytes, self._header.chunk_bytes
        try:  # what takes long to encode may cost the call: the next one finds it encoded
            data = self._payload.read(offset, min(size, self._payload.num_bytes - offset))
        except Exception as error:
            self.error = error
            raise
        if self._is_signed:
            self._hashes.add(index, data)
        if watched is not None:
            watched.still = 0
        return data


# Down --------------------------------------------------------------------------------------------


def download(down: Direction, patience: Patience, request: wire.DownloadRequest) -> Delivery:
    """Fetch what is asked for, or the coordinator's reason why there is none yet.

    Memory: one block of the payload's size. Errors are those of `Patience.failed`. Of the request,
    `transfer`, `packed`, `chunks` and `checksum` are filled in here.
    """
    incoming: Reception[wire.DownloadHeader] | None = None
    began, stub = 0.0, down.stubs[0]
    while incoming is None or incoming.missing():
        wanted = wire.DownloadRequest()
        wanted.CopyFrom(request)
        wanted.transfer = secrets.randbits(63) + 1
        wanted.packed = down.packing.is_on
        if incoming is not None:
            wanted.checksum = incoming.header.checksum
            wanted.chunks.extend(incoming.missing())
        try:
            parts = messages(stub.address, stub.Download(wanted))
            first = next(parts, None)
            if first is None or first.header is None:
                raise PayloadError("a download began without its header; refused")
            if first.header.status != READY:
                if incoming is None:
                    return Delivery(first.header, None)
                incoming = None  # what was to be resumed is held no more
                continue
            if incoming is None:
                # What was waited for before the payload existed is no part of its transfer.
                began = time.monotonic()
                incoming = Reception(first.header)
                wanted.checksum = first.header.checksum
            _fetch(down, incoming, wanted, chain([first], parts))
            patience.succeeded()
        except grpc.RpcError as error:
            # A stream may break when the others have brought all that was missing.
            if incoming is None or incoming.missing():
                patience.failed(error)
    payload = incoming.claim()
    assert payload is not None, "nobody else claims a download"
    down.packing.note(payload.num_bytes, time.monotonic() - began)
    return Delivery(incoming.header, payload)


def _fetch(
    down: Direction,
    incoming: Reception[wire.DownloadHeader],
    wanted: wire.DownloadRequest,
    begun: Iterable[Part[wire.DownloadHeader]],
) -> None:
    """Store a transfer's chunks from every channel; `begun` is what the first one brings."""

    def store(parts: Iterable[Part[wire.DownloadHeader]]) -> None:
        for part in parts:
            if part.chunk is not None:
                incoming.write(part.chunk.offset, unpack(part.chunk, incoming.header.chunk_bytes))

    def ask(stub: Stub) -> None:
        store(messages(stub.address, stub.Download(wanted)))

    calls = [partial(store, begun), *(partial(ask, stub) for stub in down.stubs[1:])]
    _side_by_side(down.threads, calls[: max(1, len(incoming.missing()))])


def _side_by_side(threads: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results, the first call's in this thread; or the first error, once all have ended.

    A stripe that still ran would store what the next attempt asks for again.
    """
    others = [threads.submit(call) for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        for other in others:
            with suppress(CancelledError):  # told below; `wait` would never hear of a cancelled one
                other.exception()
    return [first, *(other.result() for other in others)]
