"""What the step loop sees of an exchange of fragments, and what both kinds of exchange share.

`fedwan.site.delta` sends deltas after H steps, `fedwan.site.gradient` gradients in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedwan.fragments import Fragment
from fedwan.site.checkpoint import Ledger
from fedwan.site.courier import Courier
from fedwan.site.meter import Meter
from fedwan.site.replica import Replica
from fedwan.strategy import Strategy

__all__ = ["Exchange", "Keeper", "Station"]


MAX_REJECTIONS = 3
"""Contributions refused in a row, after which a site gives up."""


class Keeper(Protocol):
    """Remembers what a successor of this process would need."""

    def save(self, version: int, durable_version: int, ledger: Ledger) -> None:
        """The steps that lead to a version are complete; see `SiteCheckpoints.save`."""
        ...

    def discard(self, version: int) -> None:
        """What led to this version was refused: nobody shall send it again."""
        ...


class Exchange(Protocol):
    """What the step loop sees of a strategy."""

    @property
    def versions(self) -> list[int]:
        """Per fragment, what this site holds."""
        ...

    @property
    def expected(self) -> list[int]:
        """Per fragment, what this site will hold once all that is in flight has landed."""
        ...

    def reduce(self, networks: Sequence[str]) -> None:
        """Called inside a step, once these networks' gradients are complete."""
        ...

    def after_step(self, step: int) -> int:
        """Called after completed step `step`; the step that training stands at afterwards.

        That is an earlier one if the steps since the last version had to be thrown away, a later
        one if the others went on without this site; at a pace of its own, it is the run's.
        """
        ...

    def take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """Go on from these versions, with what a predecessor of this process left."""
        ...

    def finish(self) -> None:
        """The run is complete: hold the weights that it ended with."""
        ...

    def close(self) -> None:
        """Give up what is still on its way."""
        ...


@dataclass(frozen=True)
class Station:
    """What an exchange works with."""

    replica: Replica
    fragments: Sequence[Fragment]
    strategy: Strategy
    courier: Courier
    meter: Meter
    listen: Callable[[], None]
    """Acts on the coordinator's signals; to be called while waiting, in the step loop's thread."""
    keeper: Keeper
    num_steps: int
    """Of the run."""
    is_over: Callable[[], bool]
    """Whether the coordinator has said that the run is complete."""
