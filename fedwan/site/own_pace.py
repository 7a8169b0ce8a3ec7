"""Local steps at a pace of the site's own: it sends its delta and goes on from what is there then.

The coordinator merges each contribution when it comes, or all of them behind a barrier; in both
cases it tells a site how many steps to take next. A site waits for its own bytes, not for others'
steps, unless the policy is a barrier.
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

__all__ = ["OwnPaceExchange"]


class OwnPaceExchange(Inexact):
    """Implements `fedwan.site.exchange.Exchange` for local steps, the whole model at once.

    Memory besides the replica: the encoded contribution until it is accepted, then an update.
    A site that dies loses the steps since its last contribution, and that one if it was not merged
    yet: others may have moved the weights that it was relative to.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._follower = Follower(site)
        self._residuals = Residuals(1)
        self._mark = Work(0, 0)
        self._since = 0

    @property
    def versions(self) -> list[int]:
        """Per fragment, what this site holds."""
        return [self._follower.version]

    @property
    def expected(self) -> list[int]:
        """Per fragment, what this site holds."""
        return self.versions

    def reduce(self) -> None:
        """Gradients stay at the site."""

    def after_step(self, step: int) -> int:
        """Exchange if enough steps were taken; the step of the run afterwards."""
        self._since += 1
        if self._since < self._follower.steps:
            return step
        with self._site.meter.waiting():
            try:
                self._swap(step)
                step = self._follower.run_step
            except Over:
                pass  # the step loop ends by itself
        self._since = 0
        return step

    def _swap(self, step: int) -> None:
        site, follower = self._site, self._follower
        fragment, start = follower.fragment, follower.version
        total = site.meter.total
        done = total.since(self._mark)
        self._mark = total
        is_held = site.strategy.owes == "weights"
        residual = {} if is_held else self._residuals.of(fragment)
        delta = site.replica.delta(fragment)
        payload, owed = None, State()
        if site.group.rank == 0:
            payload, owed = site.strategy.up.encode(delta, residual, fragment.layout)
        ledger = self._residuals.ledger(residual, owed, done)
        site.save(start + 1, follower.durable_version, ledger)
        work = site.meter.work(step, done)
        with follower.ask() as asked:
            receipt = site.group.lead(
                lambda: site.stub.send_contribution(fragment.index, start, payload, work)
            )
        sent = follower.settle(receipt)
        if sent is None:
            site.discard(start + 1)
            owed = residual
        follower.catch_up(sent, asked)
        self._residuals.settle(fragment, follower.version, owed)
        if is_held:
            site.replica.owe(owed)

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """Go on from these versions, with what a predecessor of this process left."""
        self._follower.take_over(versions)
        self._residuals.restore(self._site.fragments, versions, ledger)
        if self._site.strategy.owes == "weights":
            self._site.replica.owe(self._residuals.of(self._follower.fragment))
        self._mark = self._site.meter.total
        self._since = 0

    def finish(self) -> None:
        """Take the weights that the run ended with."""
        self._follower.take_weights()

    def close(self) -> None:
        """Nothing is on its way between steps."""
        self._follower.close()
