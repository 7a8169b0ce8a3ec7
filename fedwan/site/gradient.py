"""Gradients go up in every step and their mean comes down, before the inner optimisers step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedwan.errors import FedwanError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.site.asking import Asker
from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.exchange import Inexact
from fedwan.site.residuals import Residuals
from fedwan.state import State

if TYPE_CHECKING:
    from fedwan.site.site import Site

__all__ = ["GradientExchange"]


class GradientExchange(Inexact):
    """Implements `fedwan.site.exchange.Exchange` for synchronous training.

    Memory besides the replica: the encoded gradients until they are accepted, then their mean.
    """

    def __init__(self, site: Site) -> None:
        self.versions = [0] * len(site.fragments)
        self._site = site
        self._residuals = Residuals(len(site.fragments))
        self._mark = Work(0, 0)
        self._durable_version = 0
        self._swapping = -1
        """The fragment that is on its way."""
        self._asker = Asker(site.stub, len(site.fragments))

    @property
    def expected(self) -> list[int]:
        """Per fragment, what this site will hold once all that is in flight has landed."""
        return [v + (index == self._swapping) for index, v in enumerate(self.versions)]

    def reduce(self) -> None:
        """Replace gradients by their mean over the sites."""
        meter = self._site.meter
        with meter.waiting():
            for fragment in self._site.fragments:
                self._swapping = fragment.index
                self._swap(fragment, meter.total.since(self._mark))
            self._swapping = -1
        self._mark = meter.total

    def _swap(self, fragment: Fragment, done: Work) -> None:
        site = self._site
        strategy, is_leader = site.strategy, site.group.rank == 0
        version = self.versions[fragment.index]
        residual = self._residuals.of(fragment)
        gradients = site.replica.gradients(fragment)
        payload, owed = None, State()
        if is_leader:
            payload, owed = strategy.up.encode(gradients, residual, fragment.layout)
        work = site.meter.work(version + 1, done)
        with self._asker.ask(fragment.index, version + 1, is_leader) as asked:
            receipt = site.group.lead(
                lambda: site.stub.send_contribution(fragment.index, version, payload, work)
            )
            if receipt.status == wire.Receipt.REJECTED:
                raise _lost()
        self._residuals.settle(fragment, version + 1, owed)
        arrival = site.receive(asked)
        if arrival.is_superseded:
            raise _lost()
        assert arrival.payload is not None
        site.replica.apply_gradients(arrival.payload, fragment, strategy.down)
        self.versions[fragment.index] = arrival.version
        self._durable_version = arrival.durable_version

    def after_step(self, step: int) -> int:
        """The optimisers have stepped on the mean gradient: every site is at the same weights."""
        self._site.require_reduced(min(self.versions) >= step)
        with self._site.meter.waiting():
            # The step is complete only now: its contribution has left within it.
            ledger = self._residuals.ledger({}, {}, Work(0, 0))
            self._site.save(min(self.versions), self._durable_version, ledger)
        return step

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """Go on from these versions, with what a predecessor of this process left."""
        self.versions = list(versions)
        self._residuals.restore(self._site.fragments, versions, ledger)

    def finish(self) -> None:
        """The last step was the last version."""

    def close(self) -> None:
        """Nothing is on its way between steps."""
        self._asker.close()


def _lost() -> FedwanError:
    return FedwanError(
        "this site's gradients were refused or came too late, so that its weights are not the "
        "others' any more; it will rejoin with the global weights"
    )
