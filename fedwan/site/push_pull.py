"""A parameter server's site: it pushes gradients, pulls weights, and waits for nobody else.

Asynchronous SGD (Recht et al. 2011, 1106.5730; Dean et al. 2012, the "Downpour" of DistBelief): the
coordinator has the optimisers and steps them on every gradient that comes; a site's gradient is of
the weights that it pulled last, which others have moved since.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.exchange import Station
from fedwan.site.following import Follower, Over
from fedwan.site.gradient import check_networks
from fedwan.site.residuals import Residuals

__all__ = ["PushPullExchange"]


class PushPullExchange:
    """Implements `fedwan.site.exchange.Exchange`: the site's own optimisers never step.

    Memory besides the replica: the encoded gradients until they are accepted, then an update.
    """

    def __init__(self, station: Station) -> None:
        self._station = station
        self._follower = Follower(station)
        self._residuals = Residuals(1)
        self._mark = Work(0, 0)
        self._step = 0

    @property
    def versions(self) -> list[int]:
        """See `Exchange`."""
        return [self._follower.version]

    @property
    def expected(self) -> list[int]:
        """See `Exchange`."""
        return self.versions

    def reduce(self, networks: Sequence[str]) -> None:
        """Push gradients, pull weights, and leave no gradients for the workload to step on.

        Raises:
            FedwanError: the workload reduces its networks in parts.
        """
        station = self._station
        check_networks(networks, station.replica.layout)
        with station.meter.waiting():
            try:
                self._swap()
            except Over:
                pass  # the step loop ends by itself
        for optimizer in station.replica.workload.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _swap(self) -> None:
        station, follower = self._station, self._follower
        fragment = follower.fragment
        total = station.meter.total
        residual = self._residuals.of(fragment)
        payload, owed = station.strategy.up.encode(
            station.replica.gradients(), residual, fragment.layout
        )
        work = station.meter.work(self._step + 1, total.since(self._mark))
        self._mark = total
        start = follower.version
        with follower.ask() as asked:
            receipt = station.courier.send_contribution(fragment.index, start, payload, work)
        sent = follower.settle(receipt)
        follower.catch_up(sent, asked)
        self._residuals.settle(fragment, follower.version, residual if sent is None else owed)

    def after_step(self, step: int) -> int:
        """Remember the place in the data; see `Exchange`."""
        self._step = step = self._follower.run_step
        with self._station.meter.waiting():
            self._station.keeper.save(
                self._follower.version,
                self._follower.durable_version,
                self._residuals.ledger({}, {}, Work(0, 0)),
            )
        return step

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """See `Exchange`."""
        self._follower.take_over(versions)
        self._residuals.restore(self._station.fragments, versions, ledger)
        self._mark = self._station.meter.total

    def finish(self) -> None:
        """See `Exchange`."""
        self._follower.take_weights()

    def close(self) -> None:
        """Nothing is on its way between steps."""
        self._follower.close()
