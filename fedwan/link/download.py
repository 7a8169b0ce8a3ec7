"""Fetch a payload from the coordinator: striped over channels, resumed where a stream broke."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import grpc

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.framing import Part
from fedwan.link.incoming import Incoming, Share, Shares
from fedwan.link.lanes import Lanes
from fedwan.link.methods import Stub
from fedwan.link.retry import Patience
from fedwan.link.stripes import Stretch

__all__ = ["download"]


def download(lanes: Lanes, patience: Patience, request: wire.DownloadRequest) -> Delivery:
    """Fetch what is asked for, or the coordinator's reason why there is none yet.

    Memory: one block of the payload's size.

    Args:
        lanes: the site's, downwards.
        patience: how long to try.
        request: what to fetch; `stripes` and `checksum` are filled in here.

    Raises:
        LinkLost, SessionLost, IdentityError, PayloadError: see `Patience.failed`.
    """
    stubs = lanes.stubs()
    request.stripes = len(stubs)
    incoming: Incoming | None = None
    stretch = Stretch()
    with ExitStack() as measuring:
        while True:
            try:
                if incoming is None:
                    first = _Call(stubs[0], lanes, request)
                    header = first.header()
                    if header.status != wire.DownloadHeader.READY:
                        return Delivery(header, None)
                    # What was waited for before the payload existed is no part of its transfer.
                    stretch = measuring.enter_context(lanes.stripes.measured())
                    incoming = Incoming(header)
                    is_held = _fetch_all(stubs, lanes, request, incoming, first)
                else:
                    is_held = _fetch_all(stubs, lanes, request, incoming, None)
                patience.succeeded()
                if not is_held:
                    incoming = None
                    measuring.close()
                elif not incoming.missing():
                    stretch.num_bytes = incoming.header.num_bytes
                    stretch.is_clean = not patience.num_failures
                    return Delivery(incoming.header, incoming.buffer)
            except grpc.RpcError as error:
                patience.failed(error)


class _Call:
    """A stream of chunks that can be ended early."""

    def __init__(self, stub: Stub, lanes: Lanes, request: wire.DownloadRequest) -> None:
        self.began = time.monotonic()
        """When it was asked, or answered if that had to wait for the payload."""
        self._call: Any = stub.Download(lanes.counter.sent(request))
        self._parts: Iterator[Part[wire.DownloadHeader]] = lanes.counter.receiving(self._call)
        self._first: Part[wire.DownloadHeader] | None = None

    def header(self) -> wire.DownloadHeader:
        """The first message's."""
        self._first = next(self._parts, None)
        if self._first is None or self._first.header is None:
            raise PayloadError("a download began without its header; refused")
        self.began = time.monotonic()
        return self._first.header

    @property
    def has_header(self) -> bool:
        """Whether the answer has begun."""
        return self._first is not None

    def parts(self) -> Iterator[Part[wire.DownloadHeader]]:
        """All messages."""
        if self._first is not None:
            yield self._first
        yield from self._parts

    def cancel(self) -> None:
        """Ask for no more."""
        self._call.cancel()


def _fetch_all(
    stubs: Sequence[Stub],
    lanes: Lanes,
    request: wire.DownloadRequest,
    incoming: Incoming,
    first: _Call | None,
) -> bool:
    """Fetch what is missing on all channels; False if the coordinator no longer holds it.

    Args:
        stubs: one per channel.
        lanes: the site's, downwards.
        request: what is fetched.
        incoming: where it goes.
        first: the call that brought the header and goes on with stripe 0, if there is one.
    """
    chunks = incoming.missing()
    count = len(stubs) if first is not None else max(1, min(len(stubs), len(chunks)))
    shares = Shares([chunks[index::count] for index in range(count)])

    def work(index: int, call: _Call | None) -> bool:
        share: Share | None = shares.first(index)
        while share is not None and share.chunks:
            if call is None:
                call = _Call(stubs[index], lanes, _asking(request, incoming, share))
            if not _take(call, share, shares, incoming):
                return False
            share, call = shares.steal(), None
        return True

    futures = [lanes.pool.submit(work, index, None) for index in range(1, count)]

    def elsewhere() -> bool:
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return all(future.result() for future in futures)

    return _both(lambda: work(0, first), elsewhere)


def _asking(
    request: wire.DownloadRequest, incoming: Incoming, share: Share
) -> wire.DownloadRequest:
    """The request for a share of what another request began to fetch."""
    wanted = wire.DownloadRequest()
    wanted.CopyFrom(request)
    wanted.checksum = incoming.header.checksum
    wanted.chunks.extend(share.chunks)
    return wanted


def _take(call: _Call, share: Share, shares: Shares, incoming: Incoming) -> bool:
    """Store a share's chunks as they come; False if the coordinator no longer holds them."""
    is_new = not call.has_header
    for part in call.parts():
        if part.header is not None and part.header.status != wire.DownloadHeader.READY:
            return False
        if part.chunk is not None:
            incoming.store(part.chunk)
            elapsed_s = time.monotonic() - call.began
            if is_new and not share.num_done:
                shares.answered(elapsed_s)
            if shares.arrived(share, elapsed_s):
                call.cancel()  # what comes behind was taken over by another channel
                return True
    return True


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
