"""What the step loop sees of an exchange of fragments.

`fedwan.site.delta` sends deltas after H steps, `gradient` gradients in every step, `own_pace` and
`push_pull` the same where no site waits for the others. Every process of a site runs the exchange;
rank 0 alone encodes, sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedwan.link import wire_pb2 as wire
from fedwan.site.checkpoint import Ledger

__all__ = ["MAX_REJECTIONS", "Exchange", "Inexact"]

MAX_REJECTIONS = 3
"""Contributions refused in a row, after which a site gives up."""


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

    @property
    def is_exact(self) -> bool:
        """Whether a contribution can be sent again, bit for bit, by a successor of this process."""
        ...

    def reduce(self) -> None:
        """Called inside a step, once all gradients are complete."""
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

    def send_again(self, ledger: Ledger, step: int) -> int:
        """Where `is_exact`: send the contribution that a checkpoint was taken for."""
        ...

    def catch_up(self, ledger: Ledger) -> None:
        """Where `is_exact`: the global weights hold an update that a predecessor contributed to.

        The local weights still are the predecessor's.
        """
        ...

    def follow_hook(self, header: wire.DownloadHeader, checkpoint: int) -> None:
        """After a checkpoint was taken over: a hook begins anew if all did since."""
        ...

    def finish(self) -> None:
        """The run is complete: hold the weights that it ended with."""
        ...

    def close(self) -> None:
        """Give up what is still on its way."""
        ...


class Inexact:
    """What exchanges have in common whose contributions no successor can send again."""

    is_exact = False

    def send_again(self, ledger: Ledger, step: int) -> int:
        """Never called."""
        return step

    def catch_up(self, ledger: Ledger) -> None:
        """Never called."""

    def follow_hook(self, header: wire.DownloadHeader, checkpoint: int) -> None:
        """There is no hook."""
