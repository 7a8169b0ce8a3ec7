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
from concurrent.futures import wait
from dataclasses import dataclass, field

import torch

from fedwan.errors import FedwanError, UserError
from fedwan.fragments import Fragment, due_step, reached_step
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.site.background import BufferPool, background_threads
from fedwan.site.checkpoint import Ledger, Residuals, SiteCheckpoints
from fedwan.site.meter import Meter, Work
from fedwan.site.replica import Replica
from fedwan.site.stub import CoordinatorStub, PendingUpdate, is_merged, is_superseded
from fedwan.state import Role, State
from fedwan.strategy import Landing, SiteHook, Strategy

log = logging.getLogger(__name__)

MAX_REJECTIONS = 3
"""Contributions refused in a row, after which a site gives up."""


class _Astray(FedwanError):
    """This site's steps cannot be merged: it must start over from the global weights."""


class _Refused(_Astray):
    """What it sent is not late, but cannot be used."""


class _Over(Exception):  # noqa: N818
    """The run is complete: nothing more will come."""


@dataclass
class _Flight:
    """A contribution on its way up, or the update that answers it on its way down."""

    fragment: Fragment
    version: int
    """That it contributes to."""
    lands_at: int
    held: State = field(default_factory=dict)
    """With overlap, Δ when it departed, until it is encoded."""
    sent: tuple[State, State] | None = None
    """Once it was taken: what error feedback owed before it was encoded, and afterwards."""
    unpaid: State | None = None
    """If it came too late: what is owed on, unless it was merged and only the receipt was late."""
    update: PendingUpdate = field(default_factory=PendingUpdate)


class Exchange:
    """One site's exchange; `listen` hears the coordinator, and says whether the run is over.

    Memory besides the replica: the encoded contribution until it is accepted, then the update;
    with overlap also Δ of every fragment in flight until it is encoded, about τ P / H of them.
    """

    def __init__(
        self,
        strategy: Strategy,
        num_steps: int,
        replica: Replica,
        hook: SiteHook,
        checkpoints: SiteCheckpoints,
        stub: CoordinatorStub,
        meter: Meter,
        listen: Callable[[], bool],
    ) -> None:
        self.fragments = strategy.fragments(replica.layout)
        self._strategy = strategy
        self._num_steps = num_steps
        self._replica = replica
        self._group = replica.group
        self._hook = hook
        self._checkpoints = checkpoints
        self._stub = stub
        self._meter = meter
        self._listen = listen
        count = len(self.fragments)
        self._tau = strategy.overlap.tau
        self._has_gradients = strategy.contributes == "gradient"
        self._keeps_pace = strategy.clock == "samples"
        self.is_mirrored = self._has_gradients and not self._keeps_pace
        """Whether every site's optimisers take the same steps, on the sites' mean gradient."""
        assert count == 1 or not self._keeps_pace, "at a pace of their own sites send all at once"
        self.is_exact = not (count > 1 or self._tau or self._has_gradients or self._keeps_pace)
        """Whether a contribution can be sent again, bit for bit, by a successor of this process."""
        self.versions = [0] * count
        """Per fragment, what this site holds."""
        self._durable_version = 0  # that the coordinator would resume from, as far as known
        # At a pace of its own: steps until the next upload, and where the run and this site stand.
        self._steps, self._run_step = strategy.h, 0
        self._residuals = Residuals(count)
        self._buffers = BufferPool()
        self._marks = [Work(0, 0)] * count
        self._flights: dict[int, _Flight] = {}
        self._anew: dict[int, int] = {}  # by fragment, the version at which the hook began anew
        self._rejections = 0
        self._is_reduced = False
        self._is_grounded = threading.Event()
        self._flyers = background_threads(count, "flight")
        # One more than there are fragments: a question that was given up may still be waiting.
        self._askers = background_threads(count + 1, "update")
        # One at a time: two would only share the memory's bandwidth.
        self._encoder = background_threads(1, "encode")

    @property
    def expected_step(self) -> int:
        """Where this site will stand once all that is in flight has landed."""
        return self._reached([v + (i in self._flights) for i, v in enumerate(self.versions)])

    def _reached(self, versions: Sequence[int]) -> int:
        return reached_step(self.fragments, versions, self._strategy.h, self._num_steps)

    # In the step loop ----------------------------------------------------------------------

    def reduce(self, step: int) -> None:
        """Called inside the step that leads to `step`, once all gradients are complete."""
        if not self._has_gradients:
            return
        self._is_reduced = True
        with self._meter.waiting():
            self._exchange(self.fragments, [], step)
        if self._keeps_pace:  # the weights have moved: nothing is left for optimisers to step on
            for optimizer in self._replica.inner.optimizers.values():
                optimizer.zero_grad(set_to_none=True)

    def after_step(self, step: int) -> int:
        """Called after completed step `step`; the step that training stands at afterwards.

        That is an earlier one if the steps since the last version had to be thrown away, a later
        one if the others went on without this site; at a pace of its own, it is the run's.
        """
        self._hook.after_step()
        if self._has_gradients:
            if not self._is_reduced:
                raise UserError(
                    "this run's strategy exchanges gradients, and the step had no site.reduce(); "
                    "call it after backward() and before the optimisers step"
                )
            self._is_reduced = False
            with self._meter.waiting():
                # The step is complete only now: its contribution has left within it.
                self._save(self.versions[0], self._residuals.ledger(Work(0, 0)))
            return self._run_step if self._keeps_pace else step
        is_last = step >= self._num_steps
        landing = [f for f in self._flights.values() if is_last or f.lands_at <= step]
        due = self._due(step, landing)
        if not landing and not due:
            return step
        with self._meter.waiting():
            return self._exchange(due, landing, step)

    def _save(self, version: int, ledger: Ledger) -> None:
        """The steps that lead to a version are complete."""
        self._checkpoints.save(version, self._durable_version, ledger)

    def _exchange(self, due: Sequence[Fragment], landing: Sequence[_Flight], step: int) -> int:
        is_last = step >= self._num_steps
        try:
            for flight in landing:
                self._land(flight, is_last)
            for flight in [self._depart(fragment, step) for fragment in due]:
                if self._has_gradients or is_last or flight.lands_at <= step:
                    self._land(flight, is_last)
        except _Astray as error:
            if self.is_mirrored:
                raise FedwanError(
                    "this site's gradients were refused or came too late, so that its weights are "
                    "not the others' any more; it will rejoin with the global weights"
                ) from None
            return self._start_over(isinstance(error, _Refused))
        except _Over:  # the step loop ends by itself
            self._flights.clear()
            return step
        return self._run_step if self._keeps_pace else step

    def _due(self, step: int, landing: Sequence[_Flight]) -> list[Fragment]:
        if self._keeps_pace:
            is_due = self._meter.total.since(self._marks[0]).steps >= self._steps
            return list(self.fragments) if is_due else []
        ahead = {flight.fragment.index for flight in landing}

        def due(fragment: Fragment) -> bool:
            is_ahead = fragment.index in ahead
            version = self.versions[fragment.index] + is_ahead
            is_free = is_ahead or fragment.index not in self._flights
            return is_free and step == due_step(
                fragment, version, self._strategy.h, self._num_steps
            )

        return [fragment for fragment in self.fragments if due(fragment)]

    # Departure -----------------------------------------------------------------------------

    def _depart(self, fragment: Fragment, step: int) -> _Flight:
        index, meter = fragment.index, self._meter
        done = meter.total.since(self._marks[index])
        self._marks[index] = meter.total
        work = meter.work(step, done)
        tau = min(self._tau, fragment.steps(self._strategy.h) - 1)
        flight = _Flight(fragment, self.versions[index], step + tau)
        self._flights[index] = flight
        if self._tau:
            self._take_off(flight, work, done)
            return flight
        self._ask(flight, flight.version + 1)
        try:
            self._send(flight, work, done)
        except BaseException:
            flight.update.give_up()
            raise
        return flight

    def _ask(self, flight: _Flight, version: int) -> None:
        flight.update = PendingUpdate()
        if self._group.rank == 0:
            flight.update.ask(self._stub, self._askers, flight.fragment.index, version)

    def _send(self, flight: _Flight, work: wire.Work, done: Work) -> None:
        """Encode, save and send.

        A delta is saved before it leaves: once it is merged, nobody could make up for what this
        site forgets.
        """
        fragment, version, replica = flight.fragment, flight.version, self._replica
        taken = replica.gradients(fragment) if self._has_gradients else replica.delta(fragment)
        residual = self._residual(fragment)
        payload, owed = None, State()
        if self._group.rank == 0:
            payload, owed = self._strategy.up.encode(taken, residual, fragment.layout)
        if fragment.index == 0 and not self._has_gradients:
            self._save(version + 1, self._residuals.ledger(done, fragment, (residual, owed)))
        receipt = self._group.lead(
            lambda: self._stub.send_contribution(fragment.index, version, payload, work)
        )
        self._settle(flight, receipt, residual, owed)

    def _take_off(self, flight: _Flight, work: wire.Work, done: Work) -> None:
        """Take Δ, and leave the rest to a thread of rank 0."""
        fragment, is_leader = flight.fragment, self._group.rank == 0
        if is_leader:
            flight.held = self._room(fragment)
        self._replica.take_delta(fragment, flight.held)
        self._hook.before_send(fragment)
        if fragment.index == 0:
            self._save(flight.version + 1, self._residuals.ledger(done))
        if is_leader:
            asked = PendingUpdate()
            flight.update.outcome = self._flyers.submit(self._fly, flight, asked, work)

    def _room(self, fragment: Fragment) -> State:
        """For a fragment's Δ; what lies on a GPU is left to torch, which keeps what was freed."""
        base = self._replica.base
        likes = {
            name: (spec.shape, torch.float32 if spec.role is Role.PARAMETER else spec.dtype)
            for name, spec in fragment.layout.items()
        }
        if all(base[name].device.type == "cpu" for name in likes):
            return self._buffers.lend(likes)
        return {
            name: torch.empty(shape, dtype=dtype, device=base[name].device)
            for name, (shape, dtype) in likes.items()
        }

    def _fly(self, flight: _Flight, asked: PendingUpdate, work: wire.Work) -> Delivery:
        """In a thread: encode and send, fetch the update, and advance if there is one process."""
        layout, index = flight.fragment.layout, flight.fragment.index
        up = self._strategy.up
        asked.ask(self._stub, self._askers, index, flight.version + 1)
        try:
            residual = self._residual(flight.fragment)
            growing = up.grow(layout)  # each tensor leaves as soon as it is coded
            encoding = self._encoder.submit(up.encode_into, growing, flight.held, residual, layout)
            receipt = self._stub.send_contribution(index, flight.version, growing, work)
            self._settle(flight, receipt, residual, encoding.result())
            self._buffers.take_back(flight.held)
            while not asked.is_here():
                if self._is_grounded.is_set():
                    raise _Astray
            update = asked.result()
        except BaseException:
            asked.give_up()
            raise
        if self._group.size == 1:
            self._advance(flight.fragment, update)
            update = update._replace(payload=None)
        return update

    def _settle(self, flight: _Flight, receipt: wire.Receipt, residual: State, owed: State) -> None:
        """By what became of a contribution, settle what error feedback owes, or be astray."""
        version, fragment = flight.version, flight.fragment
        if receipt.status == wire.Receipt.REJECTED:
            self._rejections += 1
            self._checkpoints.drop(version + 1)
            log.warning("contribution to version %d was refused: %s", version, receipt.text)
            if self._rejections >= MAX_REJECTIONS:
                raise FedwanError(
                    f"{self._rejections} contributions in a row were refused: {receipt.text}"
                )
            raise _Refused
        flight.sent = (residual, owed)
        if receipt.status != wire.Receipt.ACCEPTED:
            flight.unpaid = self._residuals.of(fragment)
            if self._keeps_pace:
                self._checkpoints.drop(version + 1)
                raise _Astray
        self._residuals.settle(fragment, version + 1, owed)

    def _residual(self, fragment: Fragment) -> State:
        """What the encoder must add: nothing where the delta holds it."""
        is_held = self._strategy.owes == "weights"
        return {} if is_held else self._residuals.of(fragment)

    # Landing -------------------------------------------------------------------------------

    def _receive(self, flight: _Flight) -> wire.DownloadHeader:
        """Wait for the update and put it into the global weights, or gradients, at all processes.

        At a pace of its own, one update after the other until the contribution is in them.
        """
        fragment, index = flight.fragment, flight.fragment.index
        # One that could not be merged any more is not waited for.
        last = flight.version + 1 + self._strategy.policy.max_staleness
        while True:
            update = self._stub.receive(flight.update, self._heed)
            header = update.header
            if is_superseded(update) and self._keeps_pace:
                # Its own contribution may be in them, and was not when the question was answered.
                header = self._take_weights()
            else:
                if not self._tau or self._group.size > 1:
                    self._advance(fragment, update)
                self.versions[index] = header.version
                self._durable_version = header.durable_version
            self._note(header)
            version = self.versions[index]
            has_own = 0 < header.merged_into <= version and header.merged_from >= flight.version
            if not self._keeps_pace or has_own or version > last:
                return header
            self._ask(flight, version + 1)

    def _heed(self) -> None:
        if self._listen() and self._keeps_pace:
            raise _Over

    def _advance(self, fragment: Fragment, update: Delivery) -> None:
        if is_superseded(update):
            raise _Astray
        assert update.payload is not None
        replica, down = self._replica, self._strategy.down
        if self.is_mirrored:
            replica.apply_gradients(update.payload, fragment, down)
            return
        replica.advance(update.payload, fragment, down)
        self._hook.on_update(fragment, update.payload, down)

    def _note(self, header: wire.DownloadHeader) -> None:
        self._steps = int(header.steps) or self._strategy.h
        self._run_step = int(header.run_step)

    def _land(self, flight: _Flight, is_last: bool) -> None:
        """The local weights take over the update, each fragment at a step of its own."""
        fragment, index = flight.fragment, flight.fragment.index
        header = self._receive(flight)
        del self._flights[index]
        self._rejections = 0
        version = self.versions[index]
        has_own = is_merged(header, flight.version, version)
        is_unpaid = flight.unpaid is not None and not has_own
        owed = flight.unpaid if is_unpaid else self._residuals.of(fragment)
        self._residuals.settle(fragment, version, owed or {})
        if self.is_mirrored:
            return
        steps = fragment.steps(self._strategy.h)
        is_replaced = is_last or not self._tau or steps == 1
        landing = Landing(steps, has_own, is_replaced, *(flight.sent or ({}, {})))
        is_written = self._hook.on_land(fragment, landing)
        self._renew(fragment, header, version)
        # The local weights are what the update stands for, less what a subtraction and an addition
        # round away: one site without outer optimiser takes the steps that it takes alone.
        is_own = header.is_own and not self._tau and not self._keeps_pace
        if is_written or is_own:
            self._replica.landed(fragment)
        else:
            self._replica.land(fragment, 0.0 if is_replaced else self._strategy.overlap.alpha)
        if not is_last:
            self._owe(fragment)

    def _renew(self, fragment: Fragment, header: wire.DownloadHeader, version: int) -> None:
        """Have the hook begin anew, once, where the coordinator says so."""
        if self._anew.get(fragment.index, 0) < header.anew_from <= version:
            self._anew[fragment.index] = header.anew_from
            self._hook.forget(fragment)
            log.info("state of the strategy begins anew at version %d", version)

    def _owe(self, fragment: Fragment) -> None:
        if self._strategy.owes == "weights":
            self._replica.owe(self._residuals.of(fragment))

    # Beginning, and beginning anew ---------------------------------------------------------

    def _take_weights(self) -> wire.DownloadHeader:
        """Take the present global weights whole, as both global and local."""
        weights, header = self._stub.fetch_weights()
        self._replica.adopt(weights)
        self.versions = list(header.versions)
        self._note(header)
        return header

    def _start_over(self, is_refused: bool) -> int:
        """Take the global weights; the step that they stand at."""
        self._is_grounded.set()
        flights = [f.update for f in self._flights.values()]
        for update in flights:
            update.give_up()
        if self._tau:
            wait([update.outcome for update in flights if update.outcome is not None])
        self._is_grounded.clear()
        for flight in self._flights.values():
            if flight.sent is None:  # nobody knows whether it was merged, and so paid
                self._residuals.settle(flight.fragment, flight.version, {})
        self._flights.clear()
        header = self._take_weights()
        owed = self._residuals.ledger(Work(0, 0))._replace(versions=tuple(self.versions))
        if is_refused:
            # The optimisers too: moments that are not finite would spoil every later step.
            self._replica.reset_optimizers()
        self._take_over(self.versions, None if is_refused else owed)
        for fragment in self.fragments:
            self._renew(fragment, header, self.versions[fragment.index])
        if self._keeps_pace:
            return self._run_step
        return self._reached(self.versions)

    def _take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """Go on from these versions, with what a predecessor of this process left."""
        self.versions = list(versions)
        self._residuals.restore(self.fragments, versions, ledger)
        for fragment in self.fragments:
            self._owe(fragment)
        self._marks = [self._meter.total] * len(versions)
        self._hook.on_adopt()

    def begin(self, versions: list[int], run_step: int) -> int:
        """Find this site's place in a run at these versions; the step to go on from.

        Weights are the coordinator's, the rest is of this site's nearest checkpoint.
        """
        replica, checkpoints, header = self._replica, self._checkpoints, wire.DownloadHeader()
        weights: State | None = None
        outer: State | None = None
        if is_begun := any(versions):
            weights, header, outer = self._stub.fetch_all(with_outer=self.is_mirrored)
            versions = list(header.versions)
        versions = versions or self.versions
        version, kept = versions[0], checkpoints.versions()
        # Deltas save before their contribution leaves.
        nearest = version + (not self._has_gradients)
        if self.is_exact and nearest in kept:
            if is_begun:
                replica.adopt(weights)
            return self._send_again(header, version)
        usable = max((v for v in kept if v <= nearest), default=0)
        # Whether the predecessor's last contribution was merged before it saw the update. Nothing
        # is known of that where the coordinator is new, too.
        is_missed = is_begun and self.is_exact and usable == version
        is_missed &= not header.merged_into or is_merged(header, version - 1, version)
        found = checkpoints.load(usable, with_model=is_missed) if usable else None
        if found is not None and is_missed:
            replica.load_base(weights)
            # The hook learns from it: the local weights still are the predecessor's.
            (fragment,) = self.fragments
            steps = fragment.steps(self._strategy.h)
            self._hook.on_land(fragment, Landing(steps, True, True, found.residual, found.owed))
        elif found is not None and usable == version:
            found = found._replace(owed=found.residual)  # it was not merged: nothing was paid
        # Where the update was made of its weights alone, what it left are the global ones.
        if is_begun and not (is_missed and header.is_own):
            replica.adopt(weights)
        self._take_over(versions, found)
        self._follow_hook(header, usable)
        if outer is not None:
            replica.load_optimizers(outer, is_whole=True)
        if is_begun:
            log.info("goes on from version %d", version)
            if version not in kept:
                at = f"version {usable}" if usable else "the beginning"
                log.warning("data order and optimisers go on from %s", at)
        return run_step if self._keeps_pace else self.expected_step

    def _send_again(self, header: wire.DownloadHeader, version: int) -> int:
        """The steps to the next version are complete: only their contribution may be missing."""
        (fragment,) = self.fragments
        self._follow_hook(header, version + 1)
        self._take_over([version], None)
        log.info("sends its contribution to version %d again", version)
        ledger = self._checkpoints.load(version + 1, with_model=True)
        self._residuals.settle(fragment, version, ledger.residual)
        self._marks[0] = self._meter.total.since(ledger.work)
        with self._meter.waiting():
            return self._exchange([fragment], [], (version + 1) * self._strategy.h)

    def _follow_hook(self, header: wire.DownloadHeader, checkpoint: int) -> None:
        """The hook begins anew if all did since the checkpoint of a version; 0 for none."""
        for fragment in self.fragments:
            if checkpoint > header.anew_from:
                self._anew[fragment.index] = header.anew_from
            self._renew(fragment, header, self.versions[fragment.index])

    def finish(self) -> None:
        """The run is complete: hold the weights that it ended with."""
        if self._keeps_pace:
            self._take_weights()

    def close(self) -> None:
        """Give up what is still on its way; threads end when their present call does."""
        self._is_grounded.set()
        for flight in self._flights.values():
            flight.update.give_up()
        for threads in (self._flyers, self._askers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._encoder.shutdown(wait=False)  # who reads what it encodes must not wait for ever
