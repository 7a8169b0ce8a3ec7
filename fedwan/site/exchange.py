"""How a site and the coordinator exchange a fragment: deltas after H steps, or gradients in each.

Both go the same way: encode, upload, wait for the update, apply. They differ in what is encoded,
when, and what the update is applied to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fedwan.errors import FedwanError
from fedwan.fragments import Fragment, is_due
from fedwan.link import wire_pb2 as wire
from fedwan.site.courier import Arrival, Courier
from fedwan.site.meter import Meter
from fedwan.site.replica import Replica
from fedwan.state import Role, State
from fedwan.strategy import Strategy
from fedwan.workloads.base import keep_local

__all__ = ["DeltaExchange", "Exchange", "GradientExchange", "make_exchange"]

log = logging.getLogger(__name__)

MAX_REJECTIONS = 3


class Keeper(Protocol):
    """Remembers what a successor of this process would need."""

    def save(self, version: int, residual: State, owed: State) -> None:
        """The steps that lead to a version are complete; see `SiteCheckpoints.save`."""
        ...

    def discard(self, version: int) -> None:
        """What led to this version was refused: nobody shall send it again."""
        ...


class Exchange(Protocol):
    """What the step loop sees of a strategy."""

    versions: list[int]
    residual: State
    durable_version: int

    def reduce(self, networks: Sequence[str]) -> None:
        """Called inside a step, once these networks' gradients are complete."""
        ...

    def after_step(self, step: int) -> int:
        """Called after completed step `step`; the step that training stands at afterwards.

        That is an earlier one if the steps since the last version had to be thrown away, a later
        one if the others went on without this site.
        """
        ...


class _Forgetful:
    """Keeps nothing."""

    def save(self, version: int, residual: State, owed: State) -> None:
        pass

    def discard(self, version: int) -> None:
        pass


class _Mail:
    """Send one fragment and wait for its update; shared by both exchanges."""

    def __init__(
        self,
        courier: Courier,
        strategy: Strategy,
        meter: Meter,
        between: Callable[[], None],
        keeper: Keeper,
    ) -> None:
        self._keeper = keeper
        self._courier = courier
        self._strategy = strategy
        self._meter = meter
        self._between = between
        self._rejections = 0
        self.residual: State = {}

    def swap(
        self, fragment: Fragment, version: int, step: int, tensors: Mapping[str, Tensor]
    ) -> Arrival | None:
        """The update that follows `version`; None if the contribution was refused.

        Raises:
            FedwanError: refused several times in a row.
        """
        payload, owed = self._strategy.up.encode(tensors, self.residual, fragment.layout)
        owed = self.residual | owed
        # Before it leaves: once it is merged, nobody could make up for what this site forgets.
        self._keeper.save(version + 1, self.residual, owed)
        receipt = self._courier.send_contribution(
            fragment.index, version, payload, self._meter.work(step)
        )
        if receipt.status == wire.Receipt.REJECTED:
            self._rejections += 1
            self._keeper.discard(version + 1)
            log.warning("contribution to version %d was refused: %s", version, receipt.text)
            if self._rejections >= MAX_REJECTIONS:
                raise FedwanError(
                    f"{self._rejections} contributions in a row were refused: {receipt.text}"
                )
            return None
        self._rejections = 0
        self.residual = owed
        return self._courier.fetch_update(fragment.index, version + 1, self._between)


class DeltaExchange:
    """Local steps; every H of them, Δ = global - local goes up and the update comes down.

    Memory besides the replica: the encoded contribution until it is accepted, then the update.
    """

    def __init__(
        self,
        replica: Replica,
        fragments: Sequence[Fragment],
        strategy: Strategy,
        courier: Courier,
        meter: Meter,
        between: Callable[[], None],
        keeper: Keeper,
    ) -> None:
        self.versions = [0] * len(fragments)
        self.durable_version = 0
        self._replica = replica
        self._fragments = fragments
        self._strategy = strategy
        self._courier = courier
        self._meter = meter
        self._mail = _Mail(courier, strategy, meter, between, keeper)

    @property
    def residual(self) -> State:
        """What error feedback owes."""
        return self._mail.residual

    @residual.setter
    def residual(self, value: State) -> None:
        self._mail.residual = value

    def reduce(self, networks: Sequence[str]) -> None:
        """Gradients stay at the site."""
        keep_local(networks)

    def after_step(self, step: int) -> int:
        """Upload what is due; see `Exchange`."""
        for fragment in self._fragments:
            if is_due(fragment, step, self._strategy.h):
                with self._meter.waiting():
                    self._exchange(fragment, step)
                return self.versions[fragment.index] * self._strategy.h + fragment.offset
        return step

    def _exchange(self, fragment: Fragment, step: int) -> None:
        index = fragment.index
        arrival = self._mail.swap(fragment, self.versions[index], step, self._replica.delta())
        if arrival is None:
            # The optimisers too: moments that are not finite would spoil every later step.
            self._replica.reset()
            self._replica.reset_optimizers()
            return
        self.durable_version = arrival.durable_version
        if arrival.payload is None:
            weights, version = self._courier.fetch_global()
            self._replica.adopt(weights)
            self.versions = [version] * len(self.versions)
        else:
            self._replica.apply_update(arrival.payload, fragment, self._strategy.down)
            self.versions[index] = arrival.version


class GradientExchange:
    """Every step, gradients go up and their mean comes down, before the inner optimisers step."""

    def __init__(
        self,
        replica: Replica,
        fragments: Sequence[Fragment],
        strategy: Strategy,
        courier: Courier,
        meter: Meter,
        between: Callable[[], None],
        keeper: Keeper,
    ) -> None:
        self.versions = [0] * len(fragments)
        self.durable_version = 0
        self._replica = replica
        self._fragments = fragments
        self._strategy = strategy
        self._meter = meter
        self._keeper = keeper
        # The step is not taken yet when the contribution leaves: saved after it, below.
        self._mail = _Mail(courier, strategy, meter, between, _Forgetful())
        self._networks = {
            n.partition("/")[0] for n, s in replica.layout.items() if s.role is Role.PARAMETER
        }

    @property
    def residual(self) -> State:
        """What error feedback owes."""
        return self._mail.residual

    @residual.setter
    def residual(self, value: State) -> None:
        self._mail.residual = value

    def reduce(self, networks: Sequence[str]) -> None:
        """Replace gradients by their mean over the sites.

        Raises:
            FedwanError: the workload reduces its networks in parts, or the contribution is refused,
                which repeating the same step would not mend.
        """
        if set(networks) != self._networks:
            raise FedwanError(
                f"the workload reduces {sorted(networks)} on their own, but "
                f"{sorted(self._networks)} travel together; compute all gradients first and call "
                "reduce once a step"
            )
        with self._meter.waiting():
            for fragment in self._fragments:
                version = self.versions[fragment.index]
                gradients = self._replica.gradients()
                arrival = self._mail.swap(fragment, version, version + 1, gradients)
                if arrival is None or arrival.payload is None:
                    raise FedwanError(
                        "this site's gradients were refused or came too late, so that its weights "
                        "are not the others' any more; it will rejoin with the global weights"
                    )
                self._replica.apply_gradients(arrival.payload, fragment, self._strategy.down)
                self.versions[fragment.index] = arrival.version
                self.durable_version = arrival.durable_version

    def after_step(self, step: int) -> int:
        """The optimisers have stepped on the mean gradient: every site is at the same weights."""
        with self._meter.waiting():
            self._keeper.save(min(self.versions), self.residual, self.residual)
        return step


def make_exchange(
    replica: Replica,
    fragments: Sequence[Fragment],
    strategy: Strategy,
    courier: Courier,
    meter: Meter,
    between: Callable[[], None],
    keeper: Keeper,
) -> Exchange:
    """The exchange that a strategy's `contributes` asks for."""
    kind = DeltaExchange if strategy.contributes == "delta" else GradientExchange
    return kind(replica, fragments, strategy, courier, meter, between, keeper)
