"""Local steps; every H of them Δ = global - local goes up, and the update comes down.

With an overlap of τ steps a fragment flies while the site goes on: a thread encodes Δ as it was at
departure, uploads it, fetches the update and adds it to the global weights; after τ steps
the step loop lets it land, and waits only if it is not there yet. Without overlap the same happens
at once, in the step loop's own thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from fedwan.errors import FedwanError
from fedwan.fragments import Fragment, due_step, reached_step
from fedwan.link import wire_pb2 as wire
from fedwan.site.asking import POLL_S, Asker
from fedwan.site.beside import beside_steps
from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.courier import Arrival, is_merged
from fedwan.site.eager import LookAhead
from fedwan.site.exchange import MAX_REJECTIONS, Station
from fedwan.site.inline import InlineExecutor
from fedwan.site.residuals import Residuals
from fedwan.site.spare import Room, Spares
from fedwan.site.variates import ControlVariates, Sent
from fedwan.state import State, add_prefix
from fedwan.workloads.base import keep_local

__all__ = ["DeltaExchange"]

log = logging.getLogger(__name__)


class _Astray(Exception):  # noqa: N818
    """This site's steps cannot be merged any more: it must start over from the global weights.

    Args:
        is_refused: it is not late, but what it sent cannot be used.
    """

    def __init__(self, is_refused: bool) -> None:
        super().__init__(is_refused)
        self.is_refused = is_refused


@dataclass
class _Flight:
    """A contribution on its way up, or the update that answers it on its way down."""

    fragment: Fragment
    version: int
    """That it contributes to."""
    lands_at: int
    is_waited: bool
    """Whether the step loop takes no step meanwhile."""
    held: Room
    """Δ when it departed, empty without overlap and once it is encoded; where updates land eagerly,
    what was estimated, then by how much that was wrong."""
    outcome: Future[Arrival]


class DeltaExchange:
    """Implements `fedwan.site.exchange.Exchange` for local steps.

    Memory besides the replica: the encoded contribution until it is accepted, then the update;
    with overlap also Δ of every fragment in flight, of which there are about τ P / H, until it
    is encoded; where updates land eagerly, until they land, and one more copy of the whole model.
    Room for Δ is kept for the fragments that follow.
    """

    def __init__(self, station: Station) -> None:
        count = len(station.fragments)
        self.versions = [0] * count
        self._station = station
        self._overlap = station.strategy.overlap
        self._residuals = Residuals(count)
        self._spares = Spares()
        self._marks = [Work(0, 0)] * count
        self._flights: dict[int, _Flight] = {}
        self._departing: set[int] = set()
        """Fragments whose flight lasts as long as their departure: those without overlap."""
        self._look_ahead: LookAhead | None = None
        if self._overlap.eager:
            self._look_ahead = LookAhead(self._overlap.eager, station.replica.base)
        self._variates: ControlVariates | None = None
        if station.strategy.corrects:
            replica = station.replica
            self._variates = ControlVariates(replica.live, replica.base, replica.layout)
            replica.keep(add_prefix("variates", self._variates.values))
        self._anew: dict[int, int] = {}
        """By fragment, the version at which variates began anew last."""
        self._sent: dict[int, Sent] = {}
        """By fragment, what coding made of the contribution in flight; for variates alone."""
        self._executor: Executor = (
            beside_steps(count, "flight") if self._overlap.tau else InlineExecutor()
        )
        self._asker = Asker(station.courier, count)
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
        """See `Exchange`."""
        ahead = self._flights.keys() | self._departing
        return [v + (index in ahead) for index, v in enumerate(self.versions)]

    def reduce(self, networks: Sequence[str]) -> None:
        """Gradients stay at the site."""
        keep_local(networks)

    def after_step(self, step: int) -> int:
        """Let land what has flown long enough, send off what is due; see `Exchange`."""
        if self._variates is not None:
            self._variates.correct()
        return self._exchange(step)

    def _exchange(self, step: int) -> int:
        is_last = step >= self._station.num_steps
        landing = [f for f in self._flights.values() if is_last or f.lands_at <= step]
        due = self._due(step, landing)
        if not landing and not due:
            return step
        with self._station.meter.waiting():
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
        h, num_steps = self._station.strategy.h, self._station.num_steps
        return [
            fragment
            for fragment in self._station.fragments
            if fragment.index in ahead or fragment.index not in self._flights
            if due_step(
                fragment, self.versions[fragment.index] + (fragment.index in ahead), h, num_steps
            )
            == step
        ]

    # In the step loop's thread -------------------------------------------------------------

    def _depart(self, fragment: Fragment, step: int) -> _Flight:
        index, replica = fragment.index, self._station.replica
        total = self._station.meter.total
        done = total.since(self._marks[index])
        self._marks[index] = total
        work = self._station.meter.work(step, done)
        version = self.versions[index]
        held = Room()
        if self._overlap.tau:
            held = self._spares.lend(fragment.layout, replica.base)
            replica.take_delta(fragment, held)
            if self._look_ahead is not None:
                self._look_ahead.estimate(held, replica.put, fragment)
            if index == 0:
                self._save(version + 1, self._residuals.ledger({}, {}, done))
        self._departing.add(index)
        outcome = self._executor.submit(self._fly, fragment, version, held, work, done)
        self._departing.discard(index)
        if not self._overlap.tau:
            outcome.result()  # what went wrong is told before the next fragment leaves
        tau = min(self._overlap.tau, fragment.steps(self._station.strategy.h) - 1)
        flight = _Flight(fragment, version, step + tau, tau == 0, held, outcome)
        self._flights[index] = flight
        return flight

    def _land(self, flight: _Flight, is_last: bool) -> None:
        while not flight.outcome.done():
            wait([flight.outcome], POLL_S)
            self._station.listen()
        index = flight.fragment.index
        arrival = flight.outcome.result()
        del self._flights[index]
        self._rejections = 0
        self._durable_version = arrival.durable_version
        if self._variates is not None:
            sent = self._sent.pop(index)
            if is_merged(arrival.header, flight.version, arrival.version):
                self._learn(flight.fragment, sent)
            self._renew(flight.fragment, arrival.header, arrival.version)
        is_replaced = is_last or flight.is_waited
        is_corrected = self._look_ahead is not None and not is_replaced
        self._station.replica.land(
            flight.fragment,
            0.0 if is_replaced else self._overlap.alpha,
            flight.held if is_corrected else None,
        )
        self._spares.take_back(flight.held)
        self.versions[index] = arrival.version
        if not is_last:
            self._owe(flight.fragment)

    def _learn(self, fragment: Fragment, sent: Sent) -> None:
        assert self._variates is not None
        self._variates.learn(fragment, fragment.steps(self._station.strategy.h), sent)

    def _renew(self, fragment: Fragment, header: wire.DownloadHeader, version: int) -> None:
        """Begin the variates anew, once, where the coordinator says so."""
        if self._variates is not None and (
            self._anew.get(fragment.index, 0) < header.variates_from <= version
        ):
            self._anew[fragment.index] = header.variates_from
            self._variates.forget(fragment)
            log.warning(
                "control variates begin anew at version %d, as a site lost its own", version
            )

    def resume_variates(self, header: wire.DownloadHeader, checkpoint: int) -> None:
        """After a checkpoint was taken over: begin anew if all did since.

        Args:
            header: of the global weights.
            checkpoint: its version; 0 for none.
        """
        for fragment in self._station.fragments:
            if checkpoint > header.variates_from:
                self._anew[fragment.index] = header.variates_from
            self._renew(fragment, header, self.versions[fragment.index])

    def _owe(self, fragment: Fragment) -> None:
        if self._station.strategy.owes == "weights":
            self._station.replica.owe(self._residuals.of(fragment))

    def _residual(self, fragment: Fragment) -> State:
        """What the encoder must add: nothing where the delta holds it."""
        is_held = self._station.strategy.owes == "weights"
        return {} if is_held else self._residuals.of(fragment)

    def _start_over(self, is_refused: bool) -> int:
        """Take the global weights; the step that they stand at."""
        self._is_grounded.set()
        wait([flight.outcome for flight in self._flights.values()])
        self._is_grounded.clear()
        self._flights.clear()
        station = self._station
        weights, header = station.courier.fetch_present()
        versions = list(header.versions)
        station.replica.adopt(weights)
        if is_refused:
            # The optimisers too: moments that are not finite would spoil every later step.
            station.replica.reset_optimizers()
        self.take_over(versions, None)
        for fragment in station.fragments:
            self._renew(fragment, header, versions[fragment.index])
        return reached_step(station.fragments, versions, station.strategy.h, station.num_steps)

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """See `Exchange`."""
        self.versions = list(versions)
        self._residuals.restore(self._station.fragments, versions, ledger)
        for fragment in self._station.fragments:
            self._owe(fragment)
        self._marks = [self._station.meter.total] * len(versions)
        if self._look_ahead is not None:
            self._look_ahead.forget()

    def send_again(self, ledger: Ledger, step: int) -> int:
        """Send the contribution that a predecessor's checkpoint was taken for; see `after_step`."""
        (fragment,) = self._station.fragments
        self._residuals.settle(fragment, self.versions[0], ledger.residual)
        total = self._station.meter.total
        self._marks[0] = total.since(ledger.work)
        return self._exchange(step)

    def catch_up(self, weights: State, ledger: Ledger) -> None:
        """Learn from an update that a predecessor has contributed to, and did not see.

        Args:
            weights: global, after it; the replica still holds the predecessor's.
            ledger: of the checkpoint that was taken for the contribution.
        """
        if self._variates is not None and self.is_exact:
            (fragment,) = self._station.fragments
            self._station.replica.load_base(weights)
            self._learn(fragment, Sent(ledger.residual, ledger.owed))

    def finish(self) -> None:
        """The last step's updates have landed."""

    def close(self) -> None:
        """See `Exchange`; threads end when their present call does."""
        self._is_grounded.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._asker.close()
        self._encoder.shutdown(wait=False)  # who reads what it encodes must not wait for ever

    # In a flight's thread ------------------------------------------------------------------

    def _fly(
        self, fragment: Fragment, version: int, held: Room, work: wire.Work, done: Work
    ) -> Arrival:
        station = self._station
        send = self._send_while_encoding if self._overlap.tau else self._save_and_send
        with self._asker.ask(fragment.index, version + 1) as asked:
            owed = send(fragment, version, held, work, done)
        self._residuals.settle(fragment, version + 1, owed)
        if self._look_ahead is None:
            self._spares.take_back(held)
        else:
            self._look_ahead.estimate(held, lambda n, e: held[n].copy_(e), fragment)
        arrival = asked.wait(self._heed)
        if arrival.payload is None:
            raise _Astray(is_refused=False)
        station.replica.advance(arrival.payload, fragment, station.strategy.down)
        if self._look_ahead is not None:
            self._look_ahead.correct(held, fragment)
            self._look_ahead.learn(arrival.payload, fragment, station.strategy.down)
        return arrival._replace(payload=None)

    def _save_and_send(
        self, fragment: Fragment, version: int, held: State, work: wire.Work, done: Work
    ) -> State:
        """Encode, save, send; what error feedback owes afterwards.

        Before it leaves: once it is merged, nobody could make up for what this site forgets.
        """
        residual = self._residual(fragment)
        payload, owed = self._station.strategy.up.encode(
            self._station.replica.delta(), residual, fragment.layout
        )
        if fragment.index == 0:
            self._save(version + 1, self._residuals.ledger(residual, owed, done))
        self._check(
            version,
            self._station.courier.send_contribution(fragment.index, version, payload, work),
        )
        if self._variates is not None:
            self._sent[fragment.index] = Sent(residual, owed)
        return owed

    def _send_while_encoding(
        self, fragment: Fragment, version: int, held: State, work: wire.Work, done: Work
    ) -> State:
        """Send each tensor as soon as it is coded; what error feedback owes afterwards."""
        up = self._station.strategy.up
        growing = up.grow(fragment.layout)
        encoding = self._encoder.submit(
            up.encode_into,
            growing,
            held,
            self._residual(fragment),
            fragment.layout,
        )
        receipt = self._station.courier.send_contribution(fragment.index, version, growing, work)
        owed = encoding.result()
        self._check(version, receipt)
        return owed

    def _heed(self) -> None:
        if self._is_grounded.is_set():
            raise _Astray(is_refused=False)
        if not self._overlap.tau:
            self._station.listen()

    def _check(self, version: int, receipt: wire.Receipt) -> None:
        if receipt.status != wire.Receipt.REJECTED:
            return
        self._rejections += 1
        self._station.keeper.discard(version + 1)
        log.warning("contribution to version %d was refused: %s", version, receipt.text)
        if self._rejections >= MAX_REJECTIONS:
            raise FedwanError(
                f"{self._rejections} contributions in a row were refused: {receipt.text}"
            )
        raise _Astray(is_refused=True)

    def _save(self, version: int, ledger: Ledger) -> None:
        self._station.keeper.save(version, self._durable_version, ledger)
