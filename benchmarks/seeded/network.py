"""A network that loses, delays and repeats, between sites and whichever coordinator lives.

A site's link speaks to the coordinator's hub as the data plane does: a call is carried there after
a while, served by a task of the coordinator, and its answer carried back. What breaks is told to
the site as gRPC tells it, so that the real `Patience` decides what to do. A call that broke may
still be served, and be served twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING, Any

import grpc

from benchmarks.seeded.kernel import Process
from benchmarks.seeded.threads import Future, SimpleQueue
from fedwan.codecs.payload import Source
from fedwan.errors import FedwanError, JoinRefused, SessionLost
from fedwan.link import client
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Hub
from fedwan.link.client import LEAVE_PATIENCE_S
from fedwan.link.loopback import LoopbackLink
from fedwan.link.rpc import FINAL, Patience, code_of

if TYPE_CHECKING:
    from benchmarks.seeded.world import World

HEARTBEAT_S = 4.0
SILENT_S = 20.0
"""After which a connection that carries nothing is taken for broken."""
CHUNK_BYTES = 1024


class Broken(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self.code = lambda: code
        self.details = lambda: text


class Path:
    """The way between one site and the coordinator, in both directions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.mend()

    def mend(self) -> None:
        self.cut_until = {"up": 0.0, "down": 0.0}
        self.slow = 1.0
        """Factor of all delays."""
        self.loss = 0.0
        """Share of calls that break."""
        self.repeats = 0.0
        """Share of calls that are served twice."""

    def is_cut(self, way: str) -> bool:
        return self.cut_until[way] > self._world.kernel.now

    def breaks(self, way: str) -> bool:
        is_lost = self.loss > 0.0 and self._world.random.random() < self.loss
        if is_lost:
            self._world.count(f"lost {way}")
        return is_lost or self.is_cut(way)

    def delay_s(self) -> float:
        return 0.05 * self.slow * (0.5 + self._world.random.random())


class SeededLink:
    """Implements `fedwan.link.base.Link` over a `Path`."""

    def __init__(self, world: World, site: str, process: Process) -> None:
        self._world = world
        self._kernel = world.kernel
        self._site = site
        self._process = process
        self._path = world.paths[site]
        self._session = ""
        self._step = 0
        self._stream = 0
        """Of the Control streams, the present one; -1 once the link is closed."""
        self.signals: Any = SimpleQueue()
        self.bytes_up = self.bytes_down = 0

    # Calls ---------------------------------------------------------------------------------

    def _attempt(self, serve: Callable[[Hub], Any], repeats: bool = True) -> Any:
        """One call, which may break on its way there or back."""
        world, kernel, path = self._world, self._kernel, self._path
        coordinator = world.coordinator
        if coordinator.hub is None or coordinator.process.is_dead:
            kernel.park(path.delay_s())
            raise Broken("connection refused")
        if path.breaks("up"):
            kernel.park(world.random.choice((path.delay_s(), SILENT_S)))
            raise Broken("connection reset")
        outcome, hub = Future(), coordinator.hub

        def handle() -> None:
            answer, error = None, None
            try:
                answer = serve(hub)
            except FedwanError as failure:
                error = Broken(str(failure), code_of(failure))
            except OSError as failure:
                error = Broken(str(failure), grpc.StatusCode.RESOURCE_EXHAUSTED)
            if path.breaks("down"):
                error = Broken("connection reset")

            def carry_back() -> None:
                outcome.set_exception(error) if error else outcome.set_result(answer)

            kernel.spawn(self._process, carry_back, f"{self._site} answer", path.delay_s())

        def again() -> None:
            with suppress(FedwanError, OSError):
                serve(hub)

        kernel.spawn(coordinator.process, handle, f"call of {self._site}", path.delay_s())
        if repeats and path.repeats and world.random.random() < path.repeats:
            world.count("repeated")
            later_s = path.delay_s() * world.random.choice((1, 20, 400))
            kernel.spawn(coordinator.process, again, f"call of {self._site} again", later_s)
        while True:
            with suppress(TimeoutError):
                return outcome.result(SILENT_S)
            gone = coordinator.process
            if gone.is_dead or gone.stopped_until > kernel.now:
                raise Broken("connection timed out")

    def _call(
        self, serve: Callable[[Hub], Any], patience_s: float = 0.0, repeats: bool = True
    ) -> Any:
        patience = self._patience(patience_s)
        while True:
            try:
                return self._attempt(serve, repeats)
            except grpc.RpcError as error:
                patience.failed(error)

    def _patience(self, patience_s: float = 0.0) -> Patience:
        patience_s = patience_s or self._world.config.round.patience_s
        return Patience("coordinator", patience_s, lambda: None, self._kernel.park)

    # The link ------------------------------------------------------------------------------

    def join(self, hello: wire.Hello) -> wire.Welcome:
        self._session = hello.session
        welcome: wire.Welcome = self._call(lambda hub: hub.join(self._site, hello))
        if welcome.refusal:
            raise JoinRefused(welcome.refusal)
        if not welcome.is_waiting:
            self._world.joined[self._site] = welcome.start
            self.signals = SimpleQueue()
            self._stream += 1
            self._kernel.spawn(self._process, self._control, f"{self._site} control")
        return welcome

    def heartbeat(self, step: int) -> None:
        self._step = step

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        header.session = self._session
        header.chunk_bytes = CHUNK_BYTES
        header.num_bytes = size = payload.num_bytes
        chunks = {
            at: bytes(payload.read(at, min(CHUNK_BYTES, size - at)))
            for at in range(0, size, CHUNK_BYTES)
        }
        patience = self._patience()
        offsets = list(chunks)
        while True:
            sent = wire.UploadHeader()
            sent.CopyFrom(header)
            try:
                receipt = self._attempt(lambda hub: self._stripe(hub, sent, chunks, offsets))  # noqa: B023
            except grpc.RpcError as error:
                patience.failed(error)
                continue
            patience.succeeded()
            if receipt.status != wire.Receipt.INCOMPLETE:
                self.bytes_up += size
                return receipt
            offsets = [index * CHUNK_BYTES for index in receipt.missing]
            self._kernel.park(0.1)

    def _stripe(
        self, hub: Hub, header: wire.UploadHeader, chunks: dict[int, bytes], offsets: list[int]
    ) -> wire.Receipt:
        """In a task of the coordinator; it may break between two chunks."""
        reception = hub.open_upload(self._site, header)
        if isinstance(reception, wire.Receipt):
            return reception
        for offset in self._world.random.sample(offsets, len(offsets)):
            if self._path.breaks("up"):
                raise OSError("connection reset")
            self._kernel.pause()
            reception.write(offset, chunks[offset])
        return hub.close_stripe(self._site, header)

    def download(self, request: wire.DownloadRequest) -> Delivery:
        delivery: Delivery = self._call(
            lambda hub: LoopbackLink(hub, self._site).download(request), repeats=False
        )
        if delivery.payload is not None:
            self.bytes_down += delivery.payload.num_bytes
        return delivery

    def report(self, report: wire.QualityReport) -> None:
        self._call(lambda hub: hub.report(self._site, report))

    def unmask(self, answer: wire.Unmasked) -> None:
        self._call(lambda hub: hub.unmask(self._site, answer))

    def leave(self, farewell: wire.Farewell) -> None:
        farewell.session = self._session
        self._call(lambda hub: hub.leave(self._site, farewell), LEAVE_PATIENCE_S)

    def close(self) -> None:
        self._stream = -1

    # Control -------------------------------------------------------------------------------

    def _control(self) -> None:
        """Heartbeats out and signals in, over one stream after the other until `close`."""
        stream, session, site = self._stream, self._session, self._site

        def is_current() -> bool:
            return self._stream == stream and not self._process.is_dead

        while is_current():
            alive = [True]
            try:
                self._attempt(lambda hub: self._attach(hub, session, alive, is_current), False)  # noqa: B023
                while alive and is_current():
                    signal = wire.SiteSignal(session=session, step=self._step)
                    self._attempt(lambda hub: hub.heard(site, signal), False)  # noqa: B023
                    self._kernel.park(HEARTBEAT_S)
            except grpc.RpcError as error:
                alive.clear()
                if FINAL.get(error.code()) is SessionLost:
                    gone = wire.CoordinatorSignal.GONE
                    self.signals.put(wire.CoordinatorSignal(kind=gone, text=error.details()))
                if error.code() in FINAL:
                    return
            self._kernel.park(client.REDIAL_S)

    def _attach(
        self, hub: Hub, session: str, alive: list[bool], is_current: Callable[[], bool]
    ) -> None:
        """In a task of the coordinator: attach, and have another one carry the signals."""
        signals = hub.attach(self._site, session)
        kernel, path, mine = self._kernel, self._path, self.signals

        def carry() -> None:
            while alive and is_current():
                try:
                    signal = signals.get(timeout=HEARTBEAT_S)
                except Empty:
                    if path.is_cut("down"):
                        break
                    continue
                if path.breaks("down"):
                    break  # and the signal is lost
                kernel.park(path.delay_s())
                kernel.spawn(self._process, lambda: mine.put(signal), "signal")  # noqa: B023
            alive.clear()
            hub.detach(self._site, session)

        kernel.spawn(kernel.current.process, carry, f"signals to {self._site}")
