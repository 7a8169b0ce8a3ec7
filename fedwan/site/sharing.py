"""A workload whose steps several processes of a site take together; the engine sees one workload.

The leader's process runs the site: it alone has the shard, the link and the checkpoints. Before
each step it tells the others what has changed in its weights and optimisers since they all stepped
(what a landing wrote, fragment by fragment, or a checkpoint), and hands out the batch. All compute
their parts of it, or all of it together (`fedwan.site.parallel`); gradients are averaged where
`Reduce` is called, unless they are already, so that any recipe may be shared; and every process
takes the same optimiser step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedwan.optim_state import optimizer_state, parameter_names
from fedwan.rng import NamedGenerators
from fedwan.site.common import (
    average_gradients,
    cuts_batch,
    digest,
    gradients_of,
    in_pieces,
    of_network,
    part_of,
    same_draws,
    whole_weights,
)
from fedwan.site.dealing import Shares
from fedwan.site.dealt import DealtHolding
from fedwan.site.holding import Holding, Own
from fedwan.site.team import Team
from fedwan.state import State, add_prefix
from fedwan.workloads.base import (
    Batch,
    Examinable,
    Following,
    Keeping,
    Reduce,
    Workload,
    discloses_inputs,
)

if TYPE_CHECKING:
    from fedwan.site.pieces import Pieces

__all__ = ["SharedWorkload", "alone"]


class SharedWorkload:
    """The leader's side; see `fedwan.workloads.base.Workload`.

    Args:
        workload: of this process.
        team: that shares it.
        shares: what `share_out` gave.
        shares_gradients: whether `reduce` changes gradients, which all are then told.

    Attributes:
        holding: the gradients and moments of all processes.
    """

    def __init__(
        self,
        workload: Workload,
        team: Team,
        shares: Shares | Pieces | None,
        *,
        shares_gradients: bool,
    ) -> None:
        self._workload = workload
        self._team = team
        self._shares = shares
        self._shares_gradients = shares_gradients
        self._weights = whole_weights(workload)
        self._seen: dict[str, tuple[int, int]] = {}
        self._untold: set[str] = set()
        self._step = 0
        self.holding = _holding(workload, shares)
        self.kept: Mapping[str, Tensor] = workload.kept if isinstance(workload, Keeping) else {}

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """Of the workload."""
        return self._workload.networks

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Of the workload."""
        return self._workload.optimizers

    @property
    def samples_from_inputs(self) -> bool:
        """See `fedwan.workloads.base.Disclosing`."""
        return discloses_inputs(self._workload)

    def begin(self, step: int) -> None:
        """See `fedwan.workloads.base.Following`."""
        self._step = step
        if isinstance(self._workload, Following):
            self._workload.begin(step)

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """One completed step of all processes; the losses are those of the leader's part."""
        draw = int(torch.randint(1 << 62, (), generator=rng["team"]))
        self._tell(batch, draw)

        def average(names: Sequence[str]) -> None:
            average_gradients(self._workload, self._team, self._shares, names)
            if self._shares_gradients:
                self._reduce(names, reduce)
            else:
                reduce(names)

        part = part_of(batch, self._team, self._shares)
        draws = rng if cuts_batch(self._shares) else same_draws(draw)
        losses = self._workload.step(part, draws, average)
        marks = _marks(self._state())
        self._seen = {name: mark for name, mark in marks.items() if name not in self._untold}
        self._untold.clear()
        return losses

    def sample(self, num: int, seed: int) -> Tensor:
        """The leader's own."""
        with self._computing("sample", {}, {"num": num, "seed": seed}):
            return self._workload.sample(num, seed)

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """The leader's own."""
        with self._computing("evaluate", real._asdict(), {"seed": seed}):
            return self._workload.evaluate(real, seed)

    def examine(self, train: Batch, held_out: Batch, seed: int) -> dict[str, Tensor]:
        """See `fedwan.workloads.base.Examinable`: the leader's own, where it has whole weights.

        Not of pieces: figures may fail, which training bears, at one process and not at another.
        """
        is_cut = self._shares is not None and self._shares.cuts_weights
        if is_cut or not isinstance(self._workload, Examinable):
            return {}
        return self._workload.examine(train, held_out, seed)

    @contextmanager
    def _computing(self, do: str, tensors: State, more: Mapping[str, int]) -> Iterator[None]:
        """Where weights are in pieces, the others compute what the leader does."""
        if self._shares is not None and self._shares.cuts_weights:
            modes = {name: network.training for name, network in self.networks.items()}
            # These may be shown for a while: they are told again once others are back.
            whole = add_prefix("weights", self._weights)
            told = add_prefix("asked", tensors) | {n: whole[n] for n in self._changed(whole)}
            self._team.tell({"do": do, "modes": modes, **more}, told)
        yield
        if self._shares is not None and self._shares.cuts_weights:
            self._shares.rest()

    def stop(self) -> bool:
        """Let the others go; whether all ended on the same weights."""
        self._tell(None, 0)
        return self._team.agree(digest(self._workload))

    def _reduce(self, names: Sequence[str], reduce: Reduce) -> None:
        """Have gradients reduced, and tell the others which ones the optimisers shall step on."""
        before = _marks(self._state())
        reduce(names)
        after = _marks(self._state())
        # Not within a step: some wrote weights, as updates do that come instead of gradients.
        self._untold |= {name for name, mark in after.items() if before.get(name) != mark}
        self._team.tell({"do": "go"}, _whole_gradients(self._workload, self._shares, names))

    def _tell(self, batch: Batch | None, draw: int) -> None:
        state = self._state()
        changed = self._changed(state)
        networks = {n.split(":")[1] for n in changed if n.startswith("optimizer:")}
        gone = {n.split(":")[1] for n in self._seen.keys() - state.keys()}  # optimisers' alone
        header = {
            "do": "stop" if batch is None else "step",
            "step": self._step,
            "draw": draw,
            "shares_gradients": self._shares_gradients,
            "optimizers": sorted(networks | gone),
            "rates": {
                name: [float(group["lr"]) for group in optimizer.param_groups]
                for name, optimizer in self.optimizers.items()
            },
        }
        told = {
            name: value
            for name, value in state.items()
            if name in changed or name.startswith("optimizer:") and name.split(":")[1] in networks
        }
        if batch is not None:
            told |= add_prefix("batch", batch._asdict())
        self._team.tell(header, told)

    def _changed(self, state: State) -> list[str]:
        """What of it was written to, or replaced, since all processes last stepped."""
        marks = _marks(state)
        return [name for name, mark in marks.items() if self._seen.get(name) != mark]

    def _state(self) -> State:
        """What all processes have alike."""
        flat = add_prefix("weights", self._weights) | add_prefix("kept", self.kept)
        for network, optimizer in self.optimizers.items() if self._shares is None else ():
            names = parameter_names(optimizer, of_network(network, self._weights))
            flat |= add_prefix(f"optimizer:{network}", optimizer_state(optimizer, names))
        return flat


@contextmanager
def alone(workload: Workload) -> Iterator[Workload]:
    """This process's part of a shared workload, for steps that the others must not take."""
    if not isinstance(workload, SharedWorkload):
        yield workload
    elif workload._shares is None:
        yield workload._workload
    else:
        assert not workload._shares.cuts_weights, "no process has networks of its own"
        with workload._shares.alone():
            yield workload._workload


def _holding(workload: Workload, shares: Shares | Pieces | None) -> Holding:
    """That of all processes, for the leader."""
    if shares is None:
        return Own(workload)
    return shares.holding() if shares.cuts_weights else DealtHolding(shares)


def _marks(state: State) -> dict[str, tuple[int, int]]:
    """What tells whether a tensor was written to or replaced."""
    return {name: (value.data_ptr(), value._version) for name, value in state.items()}


def _whole_gradients(
    workload: Workload, shares: Shares | Pieces | None, names: Sequence[str]
) -> State:
    return {} if in_pieces(shares) else gradients_of(workload, names)
