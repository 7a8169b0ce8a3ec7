"""Transfers: their order, and a site's end of them, striped and resumed where a stream broke.

Transfers of one site in one direction go one after the other (`TransferQueue`): side by side they
would all end late, while the other direction stands idle. The chunks of one transfer go to
whichever channel has room (`ChunkQueue`): with fixed shares the slowest channel would decide.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar, cast

import grpc

from fedwan.codecs.payload import Source
from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Reception
from fedwan.link.framing import Packing, Part, pack, plain, unpack
from fedwan.link.rpc import Patience, Stub, Watched, messages, watch

T = TypeVar("T")
CHECKED_S = 0.05
"""Between the first two questions whether a whole payload has been checked."""
READY = wire.DownloadHeader.READY
WAKE_S = 1.0
MAX_QUEUES = 1024
"""Chunk queues remembered: those in use, and some that are empty."""


class ChunkQueue(Iterator[int]):
    """Gives each chunk once, in order, to any thread that asks."""

    def __init__(self, chunks: Iterable[int]) -> None:
        self._rest = iter(chunks)
        self._lock = threading.Lock()
        self.is_empty = False
        """Whether somebody asked in vain."""

    def __next__(self) -> int:
        with self._lock:
            for chunk in self._rest:
                return chunk
            self.is_empty = True
            raise StopIteration


class SharedQueues:
    """Chunk queues of downloads that arrive as several calls, by site and the transfer's number.

    An empty one is remembered for a while: a call that comes late has nothing left to do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: OrderedDict[tuple[str, int], ChunkQueue] = OrderedDict()

    def join(self, site: str, transfer: int, chunks: Iterable[int]) -> ChunkQueue:
        """The queue of a transfer; of these chunks, if this is its first call."""
        with self._lock:
            queue = self._queues.setdefault((site, transfer), ChunkQueue(chunks))
            self._queues.move_to_end((site, transfer))
            while len(self._queues) > MAX_QUEUES:
                self._queues.popitem(last=False)
            return queue


class TransferQueue:
    """First come, first served; any thread may wait in it.

    A transfer leaves the queue when its last chunk is handed over, not when it has arrived: the
    next one's chunks follow close behind.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()
        self._changed = threading.Condition()

    def enter(self, key: Hashable) -> None:
        """Wait behind the others; a key that waits already is joined."""
        with self._changed:
            self._waiting[key] = self._waiting.get(key, 0) + 1

    def wait(self, key: Hashable, is_wanted: Callable[[], bool]) -> None:
        """Return when this key is first, or no longer wanted, which is asked now and then."""
        with self._changed:
            while key in self._waiting and key != next(iter(self._waiting)) and is_wanted():
                self._changed.wait(WAKE_S)

    def leave(self, key: Hashable) -> None:
        """Undo one `enter`; the key is gone after the last."""
        with self._changed:
            if self._waiting.get(key, 0) > 1:
                self._waiting[key] -= 1
            else:
                self.end(key)

    def end(self, key: Hashable) -> None:
        """Let the next one begin; harmless if repeated."""
        with self._changed:
            if self._waiting.pop(key, None) is not None:
                self._changed.notify_all()

    def following(self, key: Hashable, chunks: Iterable[int]) -> Iterator[int]:
        """The same chunks; the transfer ends after the last."""
        yield from chunks
        self.end(key)

    @contextmanager
    def first(self) -> Iterator[Hashable]:
        """Wait until first, which ends with `following` or with the context; yields the key."""
        key = object()
        self.enter(key)
        try:
            self.wait(key, lambda: True)
            yield key
        finally:
            self.end(key)


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
            time.sleep(pause_s)  # whole, and still being checked for a stream that broke
            pause_s = min(2 * pause_s, WAKE_S)
        missing = receipts[0].missing if not missing else ()


class _Sender:
    """One payload on its way out."""

    def __init__(self, up: Direction, header: wire.UploadHeader, payload: Source) -> None:
        self._up = up
        self._header = header
        self._payload = payload
        self.error: Exception | None = None
        """Of a read of the payload: gRPC tells only that an iterator failed."""

    def send(self, chunks: Sequence[int]) -> list[wire.Receipt]:
        """A receipt per stripe. Stripes that end before the last one are told INCOMPLETE.

        Chunks wait for those of uploads that began before; a question does not.
        """
        stubs, queue = self._up.stubs[: len(chunks)], self._up.queue
        if not stubs:
            return [self._send_stripe(self._up.stubs[0], ())]
        shared = ChunkQueue(chunks)
        with queue.first() as key:
            if len(stubs) == 1:
                receipts = [self._send_stripe(stubs[0], queue.following(key, shared))]
            else:
                receipts = _all_done(
                    self._up.threads.submit(self._send_stripe, stub, queue.following(key, shared))
                    for stub in stubs
                )
        if len(chunks) <= len(stubs):
            self._up.on_connected()  # there may have been no second message
        return receipts

    def _send_stripe(self, stub: Stub, chunks: Iterable[int]) -> wire.Receipt:
        with watch(stub.address) as watched:
            receipt = watched.result(stub.Upload.future(self._parts(chunks, watched)))
        return cast(wire.Receipt, receipt)

    def _parts(self, chunks: Iterable[int], watched: Watched) -> Iterator[Part[wire.UploadHeader]]:
        """The messages of one stripe; the first has the header, and comes even without chunks."""
        size, make = self._header.chunk_bytes, pack if self._up.packing.is_on else plain
        num_sent = 0
        for index in chunks:
            offset = index * size
            watched.is_ours = True  # it may have to be encoded first
            try:
                data = self._payload.read(offset, min(size, self._payload.num_bytes - offset))
            except Exception as error:
                self.error = error
                raise
            watched.is_ours, watched.still = False, 0
            if num_sent == 1:  # gRPC asks for the second message when it has sent the first
                self._up.on_connected()
            yield Part(None if num_sent else self._header, make(offset, data))
            num_sent += 1
        if not num_sent:
            yield Part(self._header, None)


# Down --------------------------------------------------------------------------------------------


def download(down: Direction, patience: Patience, request: wire.DownloadRequest) -> Delivery:
    """Fetch what is asked for, or the coordinator's reason why there is none yet.

    Memory: one block of the payload's size. Errors are those of `Patience.failed`. Of the request,
    `transfer`, `packed`, `chunks` and `checksum` are filled in here.
    """
    incoming: Reception[wire.DownloadHeader] | None = None
    began = 0.0
    while True:
        wanted = wire.DownloadRequest()
        wanted.CopyFrom(request)
        wanted.transfer = secrets.randbits(63) + 1
        wanted.packed = down.packing.is_on
        try:
            if incoming is None:
                parts = messages(down.stubs[0].address, down.stubs[0].Download(wanted))
                first = next(parts, None)
                if first is None or first.header is None:
                    raise PayloadError("a download began without its header; refused")
                if first.header.status != READY:
                    return Delivery(first.header, None)
                # What was waited for before the payload existed is no part of its transfer.
                began = time.monotonic()
                incoming = Reception(first.header)
                wanted.checksum = first.header.checksum
                is_held = _fetch(down, incoming, wanted, chain([first], parts))
            else:
                wanted.checksum = incoming.header.checksum
                wanted.chunks.extend(incoming.missing())
                is_held = _fetch(down, incoming, wanted)
            patience.succeeded()
            if not is_held:
                incoming = None
            elif (payload := incoming.claim()) is not None:
                down.packing.note(payload.num_bytes, time.monotonic() - began)
                return Delivery(incoming.header, payload)
        except grpc.RpcError as error:
            patience.failed(error)


def _fetch(
    down: Direction,
    incoming: Reception[wire.DownloadHeader],
    wanted: wire.DownloadRequest,
    begun: Iterable[Part[wire.DownloadHeader]] | None = None,
) -> bool:
    """Store a transfer's chunks from every channel; False if they are held no more.

    The request is the same on every channel; `begun` is what the first one brings already.
    """
    num_begun = int(begun is not None)
    most = max(0, len(incoming.missing()) - num_begun)

    def fetch(stub: Stub) -> bool:
        return _store(messages(stub.address, stub.Download(wanted)), incoming)

    futures = [down.threads.submit(fetch, stub) for stub in down.stubs[num_begun:][:most]]
    try:
        is_held = begun is None or _store(begun, incoming)
    finally:  # a stripe that still ran would store what the next attempt asks for again
        wait(futures)
    return all([is_held, *_all_done(futures)])


def _store(
    parts: Iterable[Part[wire.DownloadHeader]], incoming: Reception[wire.DownloadHeader]
) -> bool:
    for part in parts:
        if part.header is not None and part.header.status != READY:
            return False
        if part.chunk is not None:
            incoming.write(part.chunk.offset, unpack(part.chunk, incoming.header.chunk_bytes))
    return True


def _all_done(futures: Iterable[Future[T]]) -> list[T]:
    """Results, or the first error once all have ended."""
    begun = list(futures)
    wait(begun)
    return [future.result() for future in begun]
