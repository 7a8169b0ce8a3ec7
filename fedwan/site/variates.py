"""Control variates: what a site's steps lack of all sites' steps, added to each of them.

After H steps from the same weights a site stands at l and the merged weights at g. What its steps
had in common with the others' is in both; the rest, (g - l) / H a step, is owed to its shard. Added
to each step of the next round it keeps the sites together, though their data pull them apart:

    l <- step(l) + e        e <- e + (g - l) / H when g lands        sum of e over the sites = 0

The sum has to stay 0: what it lacks moves all sites the same way in every step to come. So l is
where the coordinator took the site to be, after coding, and a site whose contribution is not in g
does not learn from it. When a site comes back without what it had learnt, all begin anew.

Mishchenko et al. 2022 (2202.09357, algorithm 1, Scaffnew) for gradient descent. Here e corrects the
steps of any inner optimiser: it is in units of weights, not of gradients. It costs no byte, as g
lands anyway, where SCAFFOLD (Karimireddy et al. 2019, 1910.06378) sends as much again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.fragments import Fragment
from fedwan.state import Layout, Role, State

__all__ = ["ControlVariates", "Sent"]


class Sent(NamedTuple):
    """What coding made of a contribution: less what is owed now, and what was owed before."""

    residual: State
    """Error feedback's, that was added to it; nothing for tensors that it does not name."""
    owed: State
    """The same afterwards."""


class ControlVariates:
    """Of one site's parameters.

    Memory: a copy of the parameters, on their device. Time: to add one to the other each step.

    Args:
        live: the site's weights, changed in place.
        base: the global weights, as they land.
        layout: of both; parameters alone are corrected.
    """

    def __init__(self, live: State, base: State, layout: Layout) -> None:
        names = [name for name, spec in layout.items() if spec.role is Role.PARAMETER]
        self._live = live
        self._base = base
        self.values: State = {name: torch.zeros_like(live[name]) for name in names}
        """By parameter, what each step is corrected by: a checkpoint's to keep."""
        self._pairs: tuple[list[Tensor], list[Tensor]] = (
            [live[name] for name in names],
            list(self.values.values()),
        )

    def forget(self, fragment: Fragment) -> None:
        """E ← 0, as at the beginning of the run."""
        for name in fragment.layout.keys() & self.values.keys():
            self.values[name].zero_()

    @torch.no_grad()
    def correct(self) -> None:
        """L ← l + e, once after every step."""
        torch._foreach_add_(*self._pairs)

    @torch.no_grad()
    def learn(self, fragment: Fragment, steps: int, sent: Sent) -> None:
        """E ← e + (g - l) / H: to be called when the global weights have moved, before they land.

        Args:
            fragment: that is about to land, with this site's contribution in it.
            steps: taken and corrected since it landed last.
            sent: how coding changed the contribution.
        """
        for name in fragment.layout.keys() & self.values.keys():
            live = self._live[name]
            moved = self._base[name].to(live.dtype) - live
            if name in sent.owed:
                moved.sub_(sent.owed[name].to(live))
            if name in sent.residual:
                moved.add_(sent.residual[name].to(live))
            self.values[name].add_(moved, alpha=1 / steps)
