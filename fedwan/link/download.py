"""Fetch a payload from the coordinator: striped over channels, resumed where a stream broke."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import grpc

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.framing import Part
from fedwan.link.incoming import Incoming
from fedwan.link.lanes import Lanes
from fedwan.link.methods import Stub
from fedwan.link.retry import Patience
from fedwan.link.stripes import Stretch

__all__ = ["download"]

Parts = Iterator[Part[wire.DownloadHeader]]


def download(lanes: Lanes, patience: Patience, request: wire.DownloadRequest) -> Delivery:
    """Fetch what is asked for, or the coordinator's reason why there is none yet.

    Memory: one block of the payload's size.

    Args:
        lanes: the site's, downwards.
        patience: how long to try.
        request: what to fetch; `deal`, `packed`, `chunks` and `checksum` are filled in here.

    Raises:
        LinkLost, SessionLost, IdentityError, PayloadError: see `Patience.failed`.
    """
    incoming: Incoming | None = None
    stretch = Stretch()
    began = 0.0
    with lanes.lease() as stubs, ExitStack() as measuring:
        while True:
            try:
                if incoming is None:
                    wanted = _ask(request, None, lanes)
                    parts = _stream(stubs[0], lanes, wanted)
                    first, header = _header(parts)
                    if header.status != wire.DownloadHeader.READY:
                        return Delivery(header, None)
                    # What was waited for before the payload existed is no part of its transfer.
                    stretch = measuring.enter_context(lanes.stripes.measured())
                    began = time.monotonic()
                    incoming = Incoming(header)
                    wanted.checksum = header.checksum
                    num_others = len(incoming.missing()) - 1
                    finish = _start(stubs[1:], num_others, lanes, wanted, incoming)
                    _store([first], incoming)
                    is_held = _both(partial(_store, parts, incoming), finish)
                else:
                    wanted, num = _ask(request, incoming, lanes), len(incoming.missing())
                    is_held = _start(stubs, num, lanes, wanted, incoming)()
                patience.succeeded()
                if not is_held:
                    incoming = None
                    measuring.close()
                elif not incoming.missing():
                    stretch.num_bytes = incoming.header.num_bytes
                    stretch.is_clean = not patience.num_failures
                    lanes.packing.note(stretch.num_bytes, time.monotonic() - began)
                    return Delivery(incoming.header, incoming.buffer)
            except grpc.RpcError as error:
                patience.failed(error)


def _ask(
    request: wire.DownloadRequest, incoming: Incoming | None, lanes: Lanes
) -> wire.DownloadRequest:
    """The request of a new deal, for everything or for what is still missing."""
    wanted = wire.DownloadRequest()
    wanted.CopyFrom(request)
    wanted.deal = secrets.randbits(63) + 1
    wanted.packed = lanes.packing.is_on
    if incoming is not None:
        wanted.checksum = incoming.header.checksum
        wanted.chunks.extend(incoming.missing())
    return wanted


def _stream(stub: Stub, lanes: Lanes, wanted: wire.DownloadRequest) -> Parts:
    return lanes.counter.receiving(stub.Download(lanes.counter.sent(wanted)))


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
    lanes: Lanes,
    wanted: wire.DownloadRequest,
    incoming: Incoming,
) -> Callable[[], bool]:
    """Begin to fetch a deal's chunks; the returned call waits for the end, and says if all held.

    Args:
        stubs: one per channel.
        most: channels at most, since there are no more chunks.
        lanes: the site's, downwards.
        wanted: the request, the same on every channel.
        incoming: where chunks go.
    """

    def fetch(stub: Stub) -> bool:
        return _store(_stream(stub, lanes, wanted), incoming)

    futures = [lanes.pool.submit(fetch, stub) for stub in stubs[: max(0, most)]]

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
