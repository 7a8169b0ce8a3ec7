"""The exchange of fragments with the coordinator, whatever the strategy.

    contributes    delta      Δ = global - local, after every H steps; both weights move when the
                              update lands
                   gradient   in every step, before optimisers step (`Exchange.reduce`)
    clock          versions   every site waits for the update that its contribution is for
                   samples    each goes at a pace of its own: it takes updates one after the other,
                              up to the one that its contribution is part of; who is further behind
                              than the coordinator keeps updates for takes the whole weights
    overlap.tau    0          the step loop does all of it
                   τ          a thread encodes Δ as it was at departure, sends it, fetches the
                              update and adds it to the global weights; after τ steps the step loop
                              lets it land, and waits only if it is not there yet

Gradients under the clock `versions` are synchronous training: their mean takes the place of the
site's own. Under `samples` the coordinator has the optimisers and the site's never step: a
parameter server (Recht et al. 2011, 1106.5730; Dean et al. 2012, "Downpour").

Every process of a site runs the exchange; rank 0 alone encodes, sends and receives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import cast

from fedwan.buffers import forget, lend
from fedwan.codecs import Codec, Payload
from fedwan.errors import FedwanError, NotJoined, PayloadError, SessionLost, UserError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.site.background import await_queue, background_threads, queued_until_now
from fedwan.site.flight import Anew, CannotMerge, Flight, Over, Refused
from fedwan.site.meter import Work
from fedwan.site.place import Place
from fedwan.site.stub import is_here, is_merged, is_superseded
from fedwan.state import OnDemand, State
from fedwan.strategy import Landing

log = logging.getLogger(__name__)

MAX_REJECTIONS = 3
"""Times in a row that a site begins anew because it was refused, after which it gives up."""


def _fail(error: Exception) -> None:
    raise error


def _check_wanted(in_vain: threading.Event) -> None:
    if in_vain.is_set():
        raise CannotMerge


class Exchange:
    """One site's exchange.

    `listen` hears the coordinator, and says whether the run is over. `join_anew` joins one that was
    started again, and says which versions it has; it is told whether these must be this site's.
    Both are collective.

    Memory besides the replica: the encoded contribution until it is accepted, then the update;
    with overlap also Δ of every fragment in flight until it is encoded, about τ P / H of them. Of
    networks in pieces rank 0 has a fragment's Δ whole, in host memory, until it is encoded.
    """

    def __init__(
        self,
        place: Place,
        listen: Callable[[], bool],
        join_anew: Callable[[bool], list[int]],
    ) -> None:
        self._place = place
        self._strategy, self._residuals = place.strategy, place.residuals
        self._replica, self._group = place.replica, place.replica.group
        self._hook, self._stub, self._meter = place.hook, place.stub, place.meter
        self._listen, self._join_anew = listen, join_anew
        self._tau = place.strategy.overlap.tau
        self._flights: dict[int, Flight] = {}
        self._rejections = 0
        self.is_reduced = False
        """Whether gradients of the present step have been exchanged."""
        self._reduced_step = 0
        """Where training stands after the present step, whose gradients have been exchanged."""
        self._has_moved = False
        """Whether its weights are new global ones."""
        self._in_vain = threading.Event()
        """Set once nobody wants any more what was asked until then."""
        count = len(place.fragments)
        self._device = self._replica.device
        self._senders = background_threads(count, "flight", self._device)
        # One more than there are fragments: a question that was given up may still be waiting.
        self._fetchers = background_threads(count + 1, "update")
        # One at a time: two would only share the memory's bandwidth.
        self._encoder = background_threads(1, "encode", self._device)

    @property
    def expected_step(self) -> int:
        """Where this site will stand once all that is in flight has landed."""
        held = enumerate(self._place.versions)
        return self._place.reached([v + (i in self._flights) for i, v in held])

    def begin(self, versions: list[int], run_step: int) -> int:
        """Find this site's place in a run at these versions; the step to go on from."""
        step, is_unsent = self._place.find(versions, run_step)
        if not is_unsent:
            return step
        with self._meter.waiting():
            return self._exchange(self._place.fragments, [], step)

    # In the step loop ----------------------------------------------------------------------

    def reduce(self, step: int) -> None:
        """Called inside the step that leads to `step`, once all gradients are complete."""
        if not self._place.has_gradients:
            return
        if self.is_reduced:
            raise UserError(
                "site.reduce() was called twice in one step; call it once, after the backward "
                "passes of all networks and before their optimisers step"
            )
        self.is_reduced, self._has_moved = True, self._place.keeps_pace
        await_queue(self._device)  # until then it is computing
        with self._meter.waiting():
            self._reduced_step = self._exchange(self._place.fragments, [], step)
        if self._has_moved:
            # The weights are the global ones: nothing is left for optimisers to step on.
            for optimizer in self._replica.inner.optimizers.values():
                optimizer.zero_grad(set_to_none=True)

    def after_step(self, step: int) -> int:
        """Called after completed step `step`; the step that training stands at afterwards.

        That is an earlier one if the steps since the last version had to be thrown away, a later
        one if the others went on without this site; at a pace of its own, it is the run's.
        """
        self._hook.after_step()
        self._replica.average()
        if self._place.has_gradients:
            if not self.is_reduced:
                raise UserError(
                    "this run's strategy exchanges gradients, and the step had no site.reduce(); "
                    "call it after backward() and before the optimisers step"
                )
            self.is_reduced = False
            with self._meter.waiting():
                # The step is complete only now: its contribution has left within it.
                ledger = self._residuals.ledger(Work(0, 0))
                self._place.checkpoints.save(self._place.versions[0], ledger)
            return self._place.run_step if self._place.keeps_pace else self._reduced_step
        is_last = step >= self._place.num_steps
        landing = [f for f in self._flights.values() if is_last or f.lands_at <= step]
        due = self._place.due(step, self._flights, {f.fragment.index for f in landing})
        if not landing and not due:
            return step
        await_queue(self._device)  # until then it is computing
        with self._meter.waiting():
            return self._exchange(due, landing, step)

    def _exchange(self, due: Sequence[Fragment], landing: Sequence[Flight], step: int) -> int:
        leaving = {fragment.index for fragment in due}

        def go() -> None:
            self._replica.follow()
            for flight in landing:
                # What it has done since it left is part of what leaves now.
                is_last = step >= self._place.num_steps and flight.fragment.index not in leaving
                self._land(flight, is_last)
            self._travel([self._depart(fragment, step) for fragment in due], step)

        return self._try(go, step)

    def _try(self, go: Callable[[], None], step: int) -> int:
        """Exchange as `go` does; the step that training stands at afterwards."""
        place, anew = self._place, None
        while True:
            try:
                if anew is None:
                    go()
                else:
                    self._has_moved = True
                    place.start_over(anew)
                    step = place.reached(place.versions)
            except CannotMerge as error:
                anew = self._give_up(error)
            except SessionLost as error:
                versions = self._rejoin(error, must_start_over=anew is not None)
                if anew is not None:  # nobody knows which weights it had fetched by then
                    held = place.go_back([None] * len(versions), versions)
                    anew = anew._replace(held=held)
                elif versions:
                    anew = self._give_up(CannotMerge(), versions)
                else:
                    go = partial(self._send_again, step)
            except Over:  # the step loop ends by itself
                return step
            else:
                return place.run_step if place.keeps_pace else place.ahead(step, self._flights)

    def _travel(self, flights: Sequence[Flight], step: int) -> None:
        """Have contributions leave, and those land whose updates are waited for."""
        is_last = step >= self._place.num_steps
        if self._tau:
            for flight in flights:
                self._start_overlapped(flight)
        else:
            self._send(flights)
        for flight in flights:
            if self._place.has_gradients or is_last or flight.lands_at <= step:
                self._land(flight, is_last)

    def rejoin(self, lost: SessionLost, step: int) -> int:
        """Go on with a coordinator that was started again, as told between two exchanges.

        The step to go on from; another process goes on from this one's checkpoint where the error
        is raised.
        """
        return self._try(partial(_fail, lost), step)

    def _rejoin(self, lost: SessionLost, must_start_over: bool) -> list[int]:
        """Join a coordinator that was started again: the versions to start over from, if so.

        Without overlap, and if it has the versions that this site has, all that was on its way can
        be sent again, bit for bit: no step is lost, unless it starts over anyway. Where others
        would go on without this site, or steps in flight are lost with a process as well, it starts
        over from the global weights. Else the error is raised.
        """
        if not isinstance(lost, NotJoined) or self._place.is_behind:
            raise lost
        place, flights = self._place, list(self._flights.values())
        self._in_vain.set()
        self._group.lead(self._await_in_flight)
        self._in_vain = threading.Event()
        versions = self._join_anew(not self._can_start_over)
        # Who has followed updates since a contribution left has another Δ by now.
        is_alike = all(f.version == place.versions[f.fragment.index] for f in flights)
        is_lost = must_start_over or not is_alike or (self._tau and flights)
        if versions == place.versions and not is_lost:
            return []
        if not versions:
            raise lost
        return versions

    def _send_again(self, step: int) -> None:
        """Have what was on its way to a coordinator leave once more, for its successor."""
        # Others may have made a version of this one's number once more, without this site.
        if self._can_start_over and not self._place.holds_present():
            raise CannotMerge
        flights = list(self._flights.values())
        for flight in flights:
            if flight.is_taken:
                self._residuals.settle(flight.fragment, flight.version, flight.paid)
            flight.is_taken, flight.is_late, flight.update = False, False, None
            flight.owed = {}  # it is found once more
        self._travel(flights, step)

    @property
    def _can_start_over(self) -> bool:
        """Whether others may go on without this site, or with steps of it that nobody merged."""
        policy = self._strategy.policy
        return self._tau > 0 or self._place.keeps_pace or policy.leaves_behind

    # Departure -----------------------------------------------------------------------------

    def _depart(self, fragment: Fragment, step: int) -> Flight:
        index, meter, marks = fragment.index, self._meter, self._place.marks
        done = meter.total.since(marks[index])
        marks[index] = meter.total
        tau = min(self._tau, fragment.steps(self._strategy.h) - 1)
        part, version = self._place.parts[index], self._place.versions[index]
        work = meter.work(step, done)
        weights = self._replica.base_sha256(part) if self._strategy.up.mask_bits else ""
        header = wire.UploadHeader(fragment=index, version=version, work=work)
        # What the encoder must add: nothing where the delta holds it.
        is_held = self._strategy.owes == "weights"
        residual = State() if is_held else self._residuals.of(fragment)
        return Flight(fragment, part, version, step + tau, done, header, weights, residual)

    def _ask(self, fragment: Fragment, version: int) -> Future[Delivery] | None:
        """The update of a fragment that leads to a version, at rank 0."""
        if self._group.rank:
            return None
        heed = partial(_check_wanted, self._in_vain)
        return self._fetchers.submit(self._stub.fetch_update, fragment.index, version, heed)

    def _send(self, flights: Sequence[Flight]) -> None:
        """Encode all that is due, save, and send.

        The end of each payload stays here until all is saved, beside its way: once one is merged,
        nobody could make up for what this site forgets.
        """
        self._flights |= {flight.fragment.index: flight for flight in flights}
        encoded = [self._encode(flight) for flight in flights]
        held = [payload for payload, _ in encoded if payload is not None]

        def release(error: BaseException | None) -> None:
            for payload in held:
                payload.finish() if error is None else payload.fail(error)
            held.clear()

        leaving = {f.fragment.index: (f.version + 1, f.residual, f.owed) for f in flights}
        if 0 in leaving and not self._place.has_gradients:
            ledger = self._residuals.ledger(flights[0].done, leaving)
            self._place.checkpoints.save(leaving[0][0], ledger, release)
        else:
            release(None)
        try:
            for flight in flights:
                flight.has_left = True
                contribution = encoded.pop(0)  # its memory is free once it was taken
                if not self._place.is_behind:
                    # Sealed before: the answer may be a question about its masks.
                    flight.update = self._ask(flight.fragment, flight.version + 1)
                receipt = self._group.lead_long(partial(self._deliver, flight, *contribution))
                self._settle(flight, receipt)
        finally:
            self._place.checkpoints.settle()  # from here on weights may change

    def _encode(self, flight: Flight) -> tuple[Payload | None, str]:
        """At rank 0, the contribution, or why it cannot be encoded."""
        part, replica = flight.part, self._replica
        taken = replica.gradients(part) if self._place.has_gradients else replica.delta(part)
        if self._group.rank:
            return None, ""
        if self._place.is_behind and not all(bool(v.isfinite().all()) for v in taken.values()):
            return None, (
                "the steps that were taken again are not those that were merged: values not finite"
            )
        up = self._place.seal(part, flight.header, flight.weights_sha256)
        if self._place.has_gradients and up.has_feedback:
            grads = taken  # encoding would spoil them, and they may have to leave again
            taken = OnDemand(grads, lambda name: grads[name].clone())
        payload = up.grow(part.layout)
        try:
            flight.owed = up.encode_into(payload, taken, flight.residual, part.layout)
        except PayloadError as error:  # under masks nobody else could refuse it
            return None, str(error)
        payload.checksum = payload.digest()
        return payload, ""

    def _deliver(self, flight: Flight, payload: Payload | None, refusal: str) -> wire.Receipt:
        if refusal:
            return wire.Receipt(status=wire.Receipt.REJECTED, text=refusal)
        try:
            if self._place.is_behind:  # it is merged already
                return wire.Receipt(status=wire.Receipt.ACCEPTED)
            return self._stub.upload(payload, flight.header)
        finally:
            self._place.checkpoints.settle()  # whose error says more

    def _start_overlapped(self, flight: Flight) -> None:
        """Take Δ, and leave the rest to a thread of rank 0."""
        fragment = flight.part
        self._flights[fragment.index] = flight
        flight.has_left = True
        # What lies on a GPU is left to torch, which keeps what was freed.
        is_here = self._group.rank == 0 and self._device.type == "cpu"
        room = lend(fragment.layout) if is_here else State()
        flight.held = self._replica.take_delta(fragment, room)
        self._hook.before_send(fragment)
        if fragment.index == 0:
            ledger = self._residuals.ledger(flight.done)
            self._place.checkpoints.save(flight.version + 1, ledger)
        if self._group.rank == 0:
            taken = queued_until_now(self._device)
            flight.update = self._senders.submit(
                self._send_overlapped, flight, taken, self._in_vain
            )

    def _send_overlapped(
        self, flight: Flight, taken: Callable[[], None], in_vain: threading.Event
    ) -> Delivery:
        """In a thread: encode and send, fetch the update, and advance if there is one process."""
        up = self._place.seal(flight.part, flight.header, flight.weights_sha256)
        asked = self._ask(flight.fragment, flight.version + 1)
        self._settle(flight, self._upload_coded(flight, up, taken))
        flight.held.clear()
        while not is_here(asked):
            _check_wanted(in_vain)
        update = cast(Future[Delivery], asked).result()
        if self._group.size == 1:
            taken()
            self._advance(flight.fragment, update)
            await_queue(self._device)
            update = update._replace(payload=None)
        return update

    def _upload_coded(self, flight: Flight, up: Codec, taken: Callable[[], None]) -> wire.Receipt:
        """Encode beside the upload: each tensor leaves as soon as it is coded."""
        layout = flight.part.layout
        growing = up.grow(layout)

        def encode() -> None:
            try:
                taken()
            except BaseException as error:
                growing.fail(error)  # the upload waits for it
                raise
            flight.owed = up.encode_into(growing, flight.held, flight.residual, layout)
            growing.finish()
            await_queue(self._device)

        encoding = self._encoder.submit(encode)
        try:
            receipt = self._stub.upload(growing, flight.header)
            encoding.result()
        except FedwanError:
            if not isinstance(error := encoding.exception(), PayloadError):
                raise
            return wire.Receipt(status=wire.Receipt.REJECTED, text=str(error))
        return receipt

    def _settle(self, flight: Flight, receipt: wire.Receipt) -> None:
        """By what became of a contribution, settle what error feedback owes, or be astray."""
        version, fragment = flight.version, flight.fragment
        if receipt.status == wire.Receipt.REJECTED:
            log.warning("contribution to version %d was refused: %s", version, receipt.text)
            raise Refused(receipt.text)
        flight.is_taken, flight.paid = True, self._residuals.of(fragment)
        self._residuals.settle(fragment, version + 1, flight.owed)
        if receipt.status != wire.Receipt.ACCEPTED:
            self._place.note_others(receipt)
            flight.is_late = True
            if self._place.keeps_pace:
                self._place.checkpoints.drop(version + 1)
                raise CannotMerge

    # Landing -------------------------------------------------------------------------------

    def _receive(self, flight: Flight) -> wire.DownloadHeader:
        """Wait for the update and put it into the global weights, or gradients, at all processes.

        At a pace of its own, one update after the other until the contribution is in them.
        """
        fragment, index = flight.fragment, flight.fragment.index
        if self._place.is_behind:
            header = self._place.catch_up()
            if self._place.versions[index] != flight.version + 1:
                raise CannotMerge
            return header

        def heed() -> None:
            if self._listen() and (
                self._place.keeps_pace or self.expected_step < self._place.num_steps
            ):
                raise Over

        # One that was not merged by then is too old.
        last = flight.version + 1 + self._strategy.policy.max_staleness
        while True:
            update = self._stub.receive(flight.update, heed)
            header = update.header
            if is_superseded(update) and self._place.keeps_pace:
                # Its own contribution may be in them, and was not when the question was answered.
                header = self._place.take_weights()
            else:
                if not self._tau or self._group.size > 1:
                    self._advance(fragment, update)
                self._place.versions[index] = header.version
                self._place.checkpoints.durable_version = header.durable_version
                self._place.note_sizes(header, [fragment])
            self._place.note(header)
            version = self._place.versions[index]
            has_own = is_merged(header, flight.version, version)
            if not self._place.keeps_pace or has_own or version >= last:
                return header
            flight.update = self._ask(fragment, version + 1)

    def _advance(self, fragment: Fragment, update: Delivery) -> None:
        if is_superseded(update):
            raise CannotMerge
        assert update.payload is not None
        replica, down = self._replica, self._strategy.down
        if self._place.is_mirrored:
            replica.apply_gradients(update.payload, fragment, down)
            return
        self._place.advance(fragment, update.payload)
        self._hook.on_update(fragment, update.payload, down)

    def _land(self, flight: Flight, is_last: bool) -> None:
        """The local weights take over the update, each fragment at a step of its own."""
        fragment, index = flight.fragment, flight.fragment.index
        header = self._receive(flight)
        del self._flights[index]
        self._rejections = 0
        version = self._place.versions[index]
        has_own = is_merged(header, flight.version, version)
        # At a pace of its own it may have waited for too long.
        is_unpaid = (flight.is_late or self._place.keeps_pace) and not has_own
        owed = flight.paid if is_unpaid else self._residuals.of(fragment)
        self._residuals.settle(fragment, version, owed)
        if self._place.is_mirrored:
            return
        steps = fragment.steps(self._strategy.h)
        is_replaced = is_last or not self._tau or steps == 1
        sent = flight.residual, flight.owed
        landing = Landing(steps, flight.done.steps, has_own, is_replaced, *sent)
        is_written = self._hook.on_land(fragment, landing)
        self._place.renew(header, [fragment])
        # The local weights are what the update stands for, less what a subtraction and an addition
        # round away: one site without outer optimiser takes the steps that it takes alone.
        is_own = header.is_own and not self._tau and not self._place.keeps_pace
        if is_written or is_own:
            self._replica.landed(fragment)
        else:
            self._replica.land(fragment, 0.0 if is_replaced else self._strategy.overlap.alpha)
        if not is_last:
            self._place.owe(fragment)
            self._place.keep(fragment)

    def _give_up(self, error: CannotMerge, versions: Sequence[int] = ()) -> Anew:
        """Give up what is in flight; what to start over with.

        `versions`: of a coordinator that was started again, maybe earlier ones than this site's.
        """
        place = self._place
        self._in_vain.set()
        held, refusal = self._group.lead(self._await_in_flight)
        if versions:
            held = place.go_back(held, versions)
        self._in_vain = threading.Event()
        if isinstance(error, Refused):
            refusal = error
        if refusal is not None:
            # At every process: all of them save the next checkpoint, or none does.
            place.checkpoints.drop(place.versions[0] + 1)
            self._rejections += 1
            if self._rejections >= MAX_REJECTIONS:
                # Another process would do no better: each of these tries began with fresh weights.
                raise UserError(
                    f"{self._rejections} contributions in a row were refused: {refusal}"
                )
        unpaid = {}
        for flight in self._flights.values():
            if not flight.is_taken:  # nobody knows whether it was merged, and so paid
                if flight.has_left:
                    self._residuals.settle(flight.fragment, flight.version, {})
            elif flight.is_late:
                unpaid[flight.fragment.index] = (flight.version, flight.paid)
        self._flights.clear()
        return Anew(refusal is not None, held, unpaid)

    def _await_in_flight(self) -> tuple[list[int | None], Refused | None]:
        """Wait for what is in the air; a call of it in which nothing moves ends by itself.

        The versions of the global weights then, as what has come has moved them, and a refusal.
        """
        held: list[int | None] = list(self._place.versions)
        refusal = None
        for flight in self._flights.values() if self._tau else ():
            try:
                update = cast(Future[Delivery], flight.update).result()
                if self._group.size == 1:
                    held[flight.fragment.index] = update.header.version
            except Refused as error:
                refusal = error
            except (CannotMerge, SessionLost):
                pass
        return held, refusal

    def finish(self) -> None:
        """The run is complete: hold the weights that it ended with."""
        place = self._place
        if place.keeps_pace or place.reached(place.versions) < place.num_steps:
            self._try(partial(_fail, CannotMerge()), place.num_steps)

    def close(self) -> None:
        """Give up what is still on its way; threads end when their present call does."""
        self._in_vain.set()
        for threads in (self._senders, self._fetchers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._encoder.shutdown(wait=False)  # who reads what it encodes must not wait for ever
        forget()
