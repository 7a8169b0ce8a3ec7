"""A parameter server's site: it pushes gradients, pulls weights, and waits for nobody else.

Asynchronous SGD (Recht et al. 2011, 1106.5730; Dean et al. 2012, the "Downpour" of DistBelief): the
coordinator has the optimisers and steps them on every gradient that comes; a site's gradient is of
the weights that it pulled last, which others have moved since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.exchange import Inexact
from fedwan.site.following import Follower, Over
from fedwan.site.residuals import Residuals
from fedwan.state import State

if TYPE_CHECKING:
    from fedwan.site.site import Site

__all__ = ["PushPullExchange"]


class PushPullExchange(Inexact):
    """Implements `fedwan.site.exchange.Exchange`: the site's own optimisers never step.

    Memory besides the replica: the encoded gradients until they are accepted, then an update.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._follower = Follower(site)
        self._residuals = Residuals(1)
        self._mark = Work(0, 0)
        self._step = 0
        self._is_reduced = False

    @property
    def versions(self) -> list[int]:
        """Per fragment, what this site holds."""
        return [self._follower.version]

    @property
    def expected(self) -> list[int]:
        """Per fragment, what this site holds."""
        return self.versions

    def reduce(self) -> None:
        """Push gradients, pull weights, and leave no gradients for optimisers to step on."""
        self._is_reduced = True
        with self._site.meter.waiting():
            try:
                self._swap()
            except Over:
                pass  # the step loop ends by itself
        for optimizer in self._site.replica.inner.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _swap(self) -> None:
        site, follower = self._site, self._follower
        fragment = follower.fragment
        total = site.meter.total
        residual = self._residuals.of(fragment)
        gradients = site.replica.gradients(fragment)
        payload, owed = None, State()
        if site.group.rank == 0:
            payload, owed = site.strategy.up.encode(gradients, residual, fragment.layout)
        work = site.meter.work(self._step + 1, total.since(self._mark))
        self._mark = total
        start = follower.version
        with follower.ask() as asked:
            receipt = site.group.lead(
                lambda: site.stub.send_contribution(fragment.index, start, payload, work)
            )
        sent = follower.settle(receipt)
        follower.catch_up(sent, asked)
        self._residuals.settle(fragment, follower.version, residual if sent is None else owed)

    def after_step(self, step: int) -> int:
        """Remember the place in the data; the step of the run."""
        self._site.require_reduced(self._is_reduced)
        self._is_reduced = False
        self._step = step = self._follower.run_step
        with self._site.meter.waiting():
            self._site.save(
                self._follower.version,
                self._follower.durable_version,
                self._residuals.ledger({}, {}, Work(0, 0)),
            )
        return step

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """Go on from these versions, with what a predecessor of this process left."""
        self._follower.take_over(versions)
        self._residuals.restore(self._site.fragments, versions, ledger)
        self._mark = self._site.meter.total

    def finish(self) -> None:
        """Take the weights that the run ended with."""
        self._follower.take_weights()

    def close(self) -> None:
        """Nothing is on its way between steps."""
        self._follower.close()
