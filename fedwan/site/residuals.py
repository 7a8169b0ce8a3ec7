"""What error feedback owes, per fragment, and at which version it was owed."""

from __future__ import annotations

from collections.abc import Sequence

from fedwan.fragments import Fragment
from fedwan.site.checkpoint import Ledger, Work
from fedwan.state import State

__all__ = ["Residuals"]


class Residuals:
    """What error feedback owes, and to which version of each fragment."""

    def __init__(self, num_fragments: int) -> None:
        self._owed: list[State] = [{} for _ in range(num_fragments)]
        self._versions = [0] * num_fragments

    def of(self, fragment: Fragment) -> State:
        """What is owed on a fragment."""
        return self._owed[fragment.index]

    def settle(self, fragment: Fragment, version: int, owed: State) -> None:
        """The contribution that leads to `version` was accepted."""
        self._owed[fragment.index] = owed
        self._versions[fragment.index] = version

    def ledger(self, residual: State, owed: State, work: Work) -> Ledger:
        """For a checkpoint; `residual` and `owed` are of the fragment that is about to leave."""
        everything = {name: value for state in self._owed for name, value in state.items()}
        return Ledger(everything | residual, everything | owed, work, tuple(self._versions))

    def restore(
        self, fragments: Sequence[Fragment], versions: Sequence[int], ledger: Ledger | None
    ) -> None:
        """Take over what is still owed at these versions, and forget the rest.

        What was owed before a contribution that has been merged since is partly paid: sending it
        again would count it twice.
        """
        for fragment, version in zip(fragments, versions, strict=True):
            if ledger is not None and ledger.versions[fragment.index] == version:
                owed = {n: ledger.owed[n] for n in fragment.layout if n in ledger.owed}
                self.settle(fragment, version, owed)
            elif self._versions[fragment.index] != version:
                self.settle(fragment, version, {})
