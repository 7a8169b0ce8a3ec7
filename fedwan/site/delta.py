"""Local steps; every H of them Δ = global - local goes up, and the update comes down.

With an overlap of τ steps a fragment flies while the site goes on: a thread encodes Δ as it was at
departure, uploads it, fetches the update and adds it to the global weights; after τ steps the step
loop lets it land, and waits only if it is not there yet. Without overlap the step loop does all of
it itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedwan.errors import FedwanError
from fedwan.fragments import Fragment, due_step, reached_step
from fedwan.link import wire_pb2 as wire
from fedwan.site.asking import Asker
from fedwan.site.beside import beside_steps
from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.exchange import MAX_REJECTIONS
from fedwan.site.hook import Landing, SiteHook
from fedwan.site.residuals import Residuals
from fedwan.site.spare import Room, Spares
from fedwan.site.stub import Arrival, is_merged
from fedwan.state import State

if TYPE_CHECKING:
    from fedwan.site.site import Site

__all__ = ["DeltaExchange"]

log = logging.getLogger(__name__)


class _Astray(FedwanError):
    """This site's steps cannot be merged any more: it must start over from the global weights."""

    def __init__(self, text: str = "", is_refused: bool = False) -> None:
        super().__init__(text)
        self.is_refused = is_refused

    def __reduce__(self) -> tuple[type[_Astray], tuple[str, bool]]:
        return type(self), (str(self), self.is_refused)


@dataclass
class _Flight:
    """A contribution on its way up, or the update that answers it on its way down."""

    fragment: Fragment
    version: int
    """That it contributes to."""
    lands_at: int
    held: Room
    """Δ when it departed, until it is encoded; empty without overlap."""
    sent: tuple[State, State] = ({}, {})
    """What error feedback owed before the contribution was encoded, and afterwards."""
    outcome: Future[Arrival] | None = None
    """With overlap, at rank 0."""
    arrival: Arrival | None = None
    """Without overlap."""


class DeltaExchange:
    """Implements `fedwan.site.exchange.Exchange` for local steps.

    Memory besides the replica: the encoded contribution until it is accepted, then the update;
    with overlap also Δ of every fragment in flight, of which there are about τ P / H, until it
    is encoded. Room for Δ is kept for the fragments that follow.
    """

    def __init__(self, site: Site, hook: SiteHook) -> None:
        count = len(site.fragments)
        self.versions = [0] * count
        self._site = site
        self._hook = hook
        self._overlap = site.strategy.overlap
        self._residuals = Residuals(count)
        self._spares = Spares()
        self._marks = [Work(0, 0)] * count
        self._flights: dict[int, _Flight] = {}
        self._departing: set[int] = set()
        """Fragments whose flight lasts as long as their departure: those without overlap."""
        self._anew: dict[int, int] = {}
        """By fragment, the version at which the hook began anew last."""
        self._flyers = beside_steps(count, "flight")
        self._asker = Asker(site.stub, count)
        # One at a time: two would only share the memory's bandwidth.
        self._encoder = beside_steps(1, "encode")
        self._is_grounded = threading.Event()
        self._rejections = 0
        self._durable_version = 0

    @property
    def is_exact(self) -> bool:
        """Whether a contribution can be sent again, bit for bit, by a successor of this process."""
        return len(self.versions) == 1 and not self._overlap.tau

    @property
    def expected(self) -> list[int]:
        """Per fragment, what this site will hold once all that is in flight has landed."""
        ahead = self._flights.keys() | self._departing
        return [v + (index in ahead) for index, v in enumerate(self.versions)]

    def reduce(self) -> None:
        """Gradients stay at the site."""

    def after_step(self, step: int) -> int:
        """Let land what has flown long enough, send off what is due."""
        self._hook.after_step()
        return self._exchange(step)

    def _exchange(self, step: int) -> int:
        is_last = step >= self._site.num_steps
        landing = [f for f in self._flights.values() if is_last or f.lands_at <= step]
        due = self._due(step, landing)
        if not landing and not due:
            return step
        with self._site.meter.waiting():
            try:
                for flight in landing:
                    self._land(flight, is_last)
                flights = [self._depart(fragment, step) for fragment in due]
                for flight in flights if is_last else [f for f in flights if f.lands_at <= step]:
                    self._land(flight, is_last)
            except _Astray as error:
                return self._start_over(error.is_refused)
        return step

    def _due(self, step: int, landing: Sequence[_Flight]) -> list[Fragment]:
        ahead = {flight.fragment.index for flight in landing}
        h, num_steps = self._site.strategy.h, self._site.num_steps
        return [
            fragment
            for fragment in self._site.fragments
            if fragment.index in ahead or fragment.index not in self._flights
            if due_step(
                fragment, self.versions[fragment.index] + (fragment.index in ahead), h, num_steps
            )
            == step
        ]

    # Departure -----------------------------------------------------------------------------

    def _depart(self, fragment: Fragment, step: int) -> _Flight:
        index, meter = fragment.index, self._site.meter
        done = meter.total.since(self._marks[index])
        self._marks[index] = meter.total
        work = meter.work(step, done)
        tau = min(self._overlap.tau, fragment.steps(self._site.strategy.h) - 1)
        flight = _Flight(fragment, self.versions[index], step + tau, Room())
        if self._overlap.tau:
            self._take_off(flight, work, done)
        else:
            self._departing.add(index)
            flight.arrival = self._exchange_at_once(flight, work, done)
            self._departing.discard(index)
        self._flights[index] = flight
        return flight

    def _exchange_at_once(self, flight: _Flight, work: wire.Work, done: Work) -> Arrival:
        """Encode, save, send, fetch: the site waits.

        Saved before it leaves: once it is merged, nobody could make up for what this site forgets.
        """
        site, index, version = self._site, flight.fragment.index, flight.version
        with self._asker.ask(index, version + 1, site.group.rank == 0) as asked:
            self._send(flight, work, done)
        arrival = site.receive(asked)
        self._advance(flight, arrival)
        return arrival

    def _send(self, flight: _Flight, work: wire.Work, done: Work) -> None:
        """Encode, save and send; Δ and its payload are gone afterwards, before the update comes."""
        site, fragment, version = self._site, flight.fragment, flight.version
        delta = site.replica.delta(fragment)
        residual = self._residual(fragment)
        payload, owed = None, State()
        if site.group.rank == 0:
            payload, owed = site.strategy.up.encode(delta, residual, fragment.layout)
        if fragment.index == 0:
            self._save(version + 1, self._residuals.ledger(residual, owed, done))
        receipt = site.group.lead(
            lambda: site.stub.send_contribution(fragment.index, version, payload, work)
        )
        self._settle(flight, receipt, residual, owed)

    def _take_off(self, flight: _Flight, work: wire.Work, done: Work) -> None:
        """Take Δ, and leave the rest to a thread."""
        site, fragment = self._site, flight.fragment
        is_leader = site.group.rank == 0
        if is_leader:
            flight.held = self._spares.lend(fragment.layout, site.replica.base)
        site.replica.take_delta(fragment, flight.held)
        self._hook.before_send(fragment)
        if fragment.index == 0:
            self._save(flight.version + 1, self._residuals.ledger({}, {}, done))
        if is_leader:
            flight.outcome = self._flyers.submit(self._fly, flight, work)

    def _fly(self, flight: _Flight, work: wire.Work) -> Arrival:
        """In a thread of rank 0: encode and send, fetch the update, and advance if it is alone."""
        site, fragment, version = self._site, flight.fragment, flight.version
        up, index = site.strategy.up, flight.fragment.index
        with self._asker.ask(index, version + 1) as asked:
            residual = self._residual(fragment)
            growing = up.grow(fragment.layout)  # each tensor leaves as soon as it is coded
            encoding = self._encoder.submit(
                up.encode_into, growing, flight.held, residual, fragment.layout
            )
            receipt = site.stub.send_contribution(index, version, growing, work)
            self._settle(flight, receipt, residual, encoding.result())
        self._spares.take_back(flight.held)
        arrival = asked.wait(self._heed)
        if site.group.size == 1:
            self._advance(flight, arrival)
            arrival = arrival._replace(payload=None)
        return arrival

    def _heed(self) -> None:
        if self._is_grounded.is_set():
            raise _Astray

    def _settle(self, flight: _Flight, receipt: wire.Receipt, residual: State, owed: State) -> None:
        """What became of a contribution: error feedback's debt is settled, or the site is astray.

        Raises:
            _Astray: it was refused.
            FedwanError: it is one of several in a row that were refused.
        """
        version = flight.version
        if receipt.status != wire.Receipt.REJECTED:
            flight.sent = (residual, owed)
            self._residuals.settle(flight.fragment, version + 1, owed)
            return
        self._rejections += 1
        self._site.discard(version + 1)
        log.warning("contribution to version %d was refused: %s", version, receipt.text)
        if self._rejections >= MAX_REJECTIONS:
            raise FedwanError(
                f"{self._rejections} contributions in a row were refused: {receipt.text}"
            )
        raise _Astray(is_refused=True)

    def _advance(self, flight: _Flight, arrival: Arrival) -> None:
        if arrival.is_superseded:
            raise _Astray
        assert arrival.payload is not None
        fragment, down = flight.fragment, self._site.strategy.down
        self._site.replica.advance(arrival.payload, fragment, down)
        self._hook.on_update(fragment, arrival.payload, down)

    # Landing -------------------------------------------------------------------------------

    def _land(self, flight: _Flight, is_last: bool) -> None:
        site, fragment, index = self._site, flight.fragment, flight.fragment.index
        arrival = flight.arrival or self._await(flight)
        del self._flights[index]
        self._rejections = 0
        self._durable_version = arrival.durable_version
        is_replaced = is_last or not self._overlap.tau or fragment.steps(site.strategy.h) == 1
        landing = Landing(
            fragment.steps(site.strategy.h),
            is_merged(arrival.header, flight.version, arrival.version),
            is_replaced,
            *flight.sent,
        )
        is_written = self._hook.on_land(fragment, landing)
        self._renew(fragment, arrival.header, arrival.version)
        # The local weights are what the update stands for, less what a subtraction and an addition
        # round away: one site without outer optimiser takes the steps that it takes alone.
        is_own = arrival.header.is_own and not self._overlap.tau
        if is_written or is_own:
            site.replica.landed(fragment)
        else:
            site.replica.land(fragment, 0.0 if is_replaced else self._overlap.alpha)
        self.versions[index] = arrival.version
        if not is_last:
            self._owe(fragment)

    def _await(self, flight: _Flight) -> Arrival:
        """The update that a thread of rank 0 fetches; what every process must do with it, done."""
        site, outcome = self._site, flight.outcome
        while not site.group.lead(lambda: outcome is not None and _is_done(outcome)):
            site.listen()
        arrival = site.share(lambda: outcome.result() if outcome else Arrival(None, 0, 0))
        if site.group.size > 1:
            self._advance(flight, arrival)
        return arrival

    def _renew(self, fragment: Fragment, header: wire.DownloadHeader, version: int) -> None:
        """Have the hook begin anew, once, where the coordinator says so."""
        if self._anew.get(fragment.index, 0) < header.anew_from <= version:
            self._anew[fragment.index] = header.anew_from
            self._hook.forget(fragment)
            log.info("state of the strategy begins anew at version %d", version)

    def follow_hook(self, header: wire.DownloadHeader, checkpoint: int) -> None:
        """After a checkpoint was taken over: the hook begins anew if all did since."""
        for fragment in self._site.fragments:
            if checkpoint > header.anew_from:
                self._anew[fragment.index] = header.anew_from
            self._renew(fragment, header, self.versions[fragment.index])

    def _owe(self, fragment: Fragment) -> None:
        if self._site.strategy.owes == "weights":
            self._site.replica.owe(self._residuals.of(fragment))

    def _residual(self, fragment: Fragment) -> State:
        """What the encoder must add: nothing where the delta holds it."""
        is_held = self._site.strategy.owes == "weights"
        return {} if is_held else self._residuals.of(fragment)

    # Beginning anew ------------------------------------------------------------------------

    def _start_over(self, is_refused: bool) -> int:
        """Take the global weights; the step that they stand at."""
        self._is_grounded.set()
        wait([f.outcome for f in self._flights.values() if f.outcome is not None])
        self._is_grounded.clear()
        self._flights.clear()
        self._departing.clear()
        site = self._site
        weights, header = site.fetch_present()
        versions = list(header.versions)
        site.replica.adopt(weights)
        if is_refused:
            # The optimisers too: moments that are not finite would spoil every later step.
            site.replica.reset_optimizers()
        self.take_over(versions, None)
        for fragment in site.fragments:
            self._renew(fragment, header, versions[fragment.index])
        return reached_step(site.fragments, versions, site.strategy.h, site.num_steps)

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """Go on from these versions, with what a predecessor of this process left."""
        self.versions = list(versions)
        self._residuals.restore(self._site.fragments, versions, ledger)
        for fragment in self._site.fragments:
            self._owe(fragment)
        self._marks = [self._site.meter.total] * len(versions)
        self._hook.on_adopt()

    def send_again(self, ledger: Ledger, step: int) -> int:
        """Send the contribution that a predecessor's checkpoint was taken for."""
        (fragment,) = self._site.fragments
        self._residuals.settle(fragment, self.versions[0], ledger.residual)
        self._marks[0] = self._site.meter.total.since(ledger.work)
        return self._exchange(step)

    def catch_up(self, ledger: Ledger) -> None:
        """Have the hook learn from an update that a predecessor contributed to, and did not see."""
        (fragment,) = self._site.fragments
        steps = fragment.steps(self._site.strategy.h)
        self._hook.on_land(fragment, Landing(steps, True, True, ledger.residual, ledger.owed))

    def _save(self, version: int, ledger: Ledger) -> None:
        self._site.save(version, self._durable_version, ledger)

    def finish(self) -> None:
        """The last step's updates have landed."""

    def close(self) -> None:
        """Threads end when their present call does."""
        self._is_grounded.set()
        self._flyers.shutdown(wait=False, cancel_futures=True)
        self._asker.close()
        self._encoder.shutdown(wait=False)  # who reads what it encodes must not wait for ever


def _is_done(outcome: Future[Arrival]) -> bool:
    return bool(wait([outcome], POLL_S).done)


POLL_S = 0.2
"""How often a site that waits for an update heeds the coordinator's signals."""
