"""Gradients go up in every step and their mean comes down, before the inner optimisers step."""

from __future__ import annotations

from collections.abc import Sequence

from fedwan.errors import FedwanError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.site.asking import Asker
from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.exchange import Station
from fedwan.site.residuals import Residuals
from fedwan.state import Layout, Role, network_of

__all__ = ["GradientExchange", "check_networks"]


def check_networks(networks: Sequence[str], layout: Layout) -> None:
    """Refuse a workload that reduces its networks in parts, where all of them travel together.

    Raises:
        FedwanError: it does.
    """
    trained = {network_of(n) for n, spec in layout.items() if spec.role is Role.PARAMETER}
    if set(networks) != trained:
        raise FedwanError(
            f"the workload reduces {sorted(networks)} on their own, but {sorted(trained)} travel "
            "together; compute all gradients first and call reduce once a step"
        )


class GradientExchange:
    """Implements `fedwan.site.exchange.Exchange` for synchronous training.

    Memory besides the replica: the encoded gradients until they are accepted, then their mean.
    """

    def __init__(self, station: Station) -> None:
        self.versions = [0] * len(station.fragments)
        self._station = station
        self._residuals = Residuals(len(station.fragments))
        self._mark = Work(0, 0)
        self._durable_version = 0
        self._swapping = -1
        """The fragment that is on its way."""
        self._asker = Asker(station.courier, len(station.fragments))

    @property
    def expected(self) -> list[int]:
        """See `Exchange`."""
        return [v + (index == self._swapping) for index, v in enumerate(self.versions)]

    def reduce(self, networks: Sequence[str]) -> None:
        """Replace gradients by their mean over the sites.

        Raises:
            FedwanError: the workload reduces its networks in parts, or the contribution is refused,
                which repeating the same step would not mend.
        """
        check_networks(networks, self._station.replica.layout)
        total = self._station.meter.total
        with self._station.meter.waiting():
            for fragment in self._station.fragments:
                self._swapping = fragment.index
                self._swap(fragment, total.since(self._mark))
            self._swapping = -1
        self._mark = total

    def _swap(self, fragment: Fragment, done: Work) -> None:
        replica, courier = self._station.replica, self._station.courier
        strategy = self._station.strategy
        version = self.versions[fragment.index]
        residual = self._residuals.of(fragment)
        payload, owed = strategy.up.encode(replica.gradients(), residual, fragment.layout)
        work = self._station.meter.work(version + 1, done)
        with self._asker.ask(fragment.index, version + 1) as asked:
            receipt = courier.send_contribution(fragment.index, version, payload, work)
        is_lost = receipt.status == wire.Receipt.REJECTED
        if is_lost:
            asked.give_up()
        else:
            self._residuals.settle(fragment, version + 1, owed)
            arrival = asked.wait(self._station.listen)
            is_lost = arrival.payload is None
        if is_lost:
            raise FedwanError(
                "this site's gradients were refused or came too late, so that its weights "
                "are not the others' any more; it will rejoin with the global weights"
            )
        assert arrival.payload is not None
        replica.apply_gradients(arrival.payload, fragment, strategy.down)
        self.versions[fragment.index] = arrival.version
        self._durable_version = arrival.durable_version

    def after_step(self, step: int) -> int:
        """The optimisers have stepped on the mean gradient: every site is at the same weights."""
        with self._station.meter.waiting():
            # The step is complete only now: its contribution has left within it.
            self._station.keeper.save(
                min(self.versions),
                self._durable_version,
                self._residuals.ledger({}, {}, Work(0, 0)),
            )
        return step

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """See `Exchange`."""
        self.versions = list(versions)
        self._residuals.restore(self._station.fragments, versions, ledger)

    def finish(self) -> None:
        """The last step was the last version."""

    def close(self) -> None:
        """Nothing is on its way between steps."""
        self._asker.close()
