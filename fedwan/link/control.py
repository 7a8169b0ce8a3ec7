"""The site's end of the Control stream: heartbeats out, signals in, on a channel of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import grpc

from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Signals
from fedwan.link.byte_counter import ByteCounter
from fedwan.link.methods import Stub

__all__ = ["ControlStream"]

log = logging.getLogger(__name__)

REDIAL_S = 0.5

_FINAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)
"""The coordinator knows this session no more, or its certificate was revoked."""


class ControlStream:
    """A thread that keeps a Control stream open until `close`, redialling when it breaks.

    Args:
        stub: of a channel that carries nothing bulky, so that no heartbeat waits for a payload.
        session: of this process.
        heartbeat_s: seconds between heartbeats.
        counter: of bytes on the wire.
    """

    def __init__(self, stub: Stub, session: str, heartbeat_s: float, counter: ByteCounter) -> None:
        self.signals: Signals = SimpleQueue()
        self.step = 0
        self._stub = stub
        self._counter = counter
        self._session = session
        self._heartbeat_s = heartbeat_s
        self._closing = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="control")
        self._thread.start()

    def close(self) -> None:
        """End the stream and its thread."""
        self._closing.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._call = self._stub.Control(self._heartbeats())
                if self._closing.is_set():  # `close` came before there was a call to cancel
                    self._call.cancel()
                for signal in self._call:
                    if self._counter.received(signal).kind != wire.CoordinatorSignal.HEARTBEAT:
                        self.signals.put(signal)
            except grpc.RpcError as error:
                if self._closing.is_set():
                    return
                if error.code() in _FINAL:
                    self.signals.put(
                        wire.CoordinatorSignal(
                            kind=wire.CoordinatorSignal.GONE, text=str(error.details())
                        )
                    )
                    return
                log.debug("control stream broke: %s", error)
            self._closing.wait(REDIAL_S)

    def _heartbeats(self) -> Iterator[wire.SiteSignal]:
        while not self._closing.is_set():
            yield self._counter.sent(wire.SiteSignal(session=self._session, step=self.step))
            self._closing.wait(self._heartbeat_s)
