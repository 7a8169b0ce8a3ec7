"""Local steps at a pace of the site's own: it sends its delta and goes on from what is there then.

The coordinator merges each contribution when it comes, or all of them behind a barrier; in both
cases it tells a site how many steps to take next. A site waits for its own bytes, not for others'
steps, unless the policy is a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.exchange import Station
from fedwan.site.following import Follower, Over
from fedwan.site.residuals import Residuals
from fedwan.workloads.base import keep_local

__all__ = ["OwnPaceExchange"]


class OwnPaceExchange:
    """Implements `fedwan.site.exchange.Exchange` for local steps, the whole model at once.

    Memory besides the replica: the encoded contribution until it is accepted, then an update.
    A site that dies loses the steps since its last contribution, and that one if it was not merged
    yet: others may have moved the weights that it was relative to.
    """

    def __init__(self, station: Station) -> None:
        self._station = station
        self._follower = Follower(station)
        self._residuals = Residuals(1)
        self._mark = Work(0, 0)
        self._since = 0

    @property
    def versions(self) -> list[int]:
        """See `Exchange`."""
        return [self._follower.version]

    @property
    def expected(self) -> list[int]:
        """See `Exchange`."""
        return self.versions

    def reduce(self, networks: Sequence[str]) -> None:
        """Gradients stay at the site."""
        keep_local(networks)

    def after_step(self, step: int) -> int:
        """Exchange if enough steps were taken; see `Exchange`."""
        self._since += 1
        if self._since < self._follower.steps:
            return step
        with self._station.meter.waiting():
            try:
                self._swap(step)
                step = self._follower.run_step
            except Over:
                pass  # the step loop ends by itself
        self._since = 0
        return step

    def _swap(self, step: int) -> None:
        station, follower = self._station, self._follower
        fragment, start = follower.fragment, follower.version
        total = station.meter.total
        done = total.since(self._mark)
        self._mark = total
        is_held = station.strategy.owes == "weights"
        residual = {} if is_held else self._residuals.of(fragment)
        payload, owed = station.strategy.up.encode(
            station.replica.delta(), residual, fragment.layout
        )
        ledger = self._residuals.ledger(residual, owed, done)
        station.keeper.save(start + 1, follower.durable_version, ledger)
        work = station.meter.work(step, done)
        with follower.ask() as asked:
            receipt = station.courier.send_contribution(fragment.index, start, payload, work)
        sent = follower.settle(receipt)
        if sent is None:
            station.keeper.discard(start + 1)
            owed = residual
        follower.catch_up(sent, asked)
        self._residuals.settle(fragment, follower.version, owed)
        if is_held:
            station.replica.owe(owed)

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """See `Exchange`."""
        self._follower.take_over(versions)
        self._residuals.restore(self._station.fragments, versions, ledger)
        if self._station.strategy.owes == "weights":
            self._station.replica.owe(self._residuals.of(self._follower.fragment))
        self._mark = self._station.meter.total
        self._since = 0

    def finish(self) -> None:
        """See `Exchange`."""
        self._follower.take_weights()

    def close(self) -> None:
        """Nothing is on its way between steps."""
        self._follower.close()
