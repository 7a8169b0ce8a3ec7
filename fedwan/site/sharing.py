"""A workload whose steps several processes of a site take together; the engine sees one workload.

The leader's process runs the site: it alone has the shard, the link and the checkpoints. Before
each step it tells the others what has changed in its weights and optimisers since they all stepped
(what a landing wrote, fragment by fragment, or a checkpoint), and hands out the batch. All compute
their parts; gradients are averaged where `Reduce` is called, so that any recipe may be shared; and
every process takes the same optimiser step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.optim_state import load_optimizer, optimizer_state, parameter_names
from fedwan.rng import NamedGenerators, derive_seed
from fedwan.site.team import Team
from fedwan.state import State, add_prefix, hash_state, select_prefix
from fedwan.workloads.base import Batch, Following, Keeping, Reduce, Workload, keep_local

__all__ = ["SharedWorkload", "alone", "follow"]


class SharedWorkload:
    """The leader's side; see `fedwan.workloads.base.Workload`.

    Args:
        workload: of this process.
        team: that shares it.
        shares_gradients: whether `reduce` changes gradients, which all are then told.
    """

    def __init__(self, workload: Workload, team: Team, *, shares_gradients: bool) -> None:
        self._workload = workload
        self._team = team
        self._shares_gradients = shares_gradients
        self._weights = _weights(workload)
        self._seen: dict[str, tuple[int, int]] = {}
        self._step = 0
        self.kept: Mapping[str, Tensor] = workload.kept if isinstance(workload, Keeping) else {}

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """Of the workload."""
        return self._workload.networks

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Of the workload."""
        return self._workload.optimizers

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
            gradients = _gradients(self._workload, names)
            self._team.average(gradients)
            reduce(names)
            if self._shares_gradients:
                self._team.share(_gradients(self._workload, names))

        losses = self._workload.step(_part(batch, self._team), rng, average)
        self._seen = _marks(self._state())
        return losses

    def sample(self, num: int, seed: int) -> Tensor:
        """The leader's own."""
        return self._workload.sample(num, seed)

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """The leader's own."""
        return self._workload.evaluate(real, seed)

    def stop(self) -> bool:
        """Let the others go; whether all ended on the same weights."""
        self._tell(None, 0)
        return self._team.agree(_digest(self._workload))

    def _tell(self, batch: Batch | None, draw: int) -> None:
        state = self._state()
        marks = _marks(state)
        changed = [name for name, mark in marks.items() if self._seen.get(name) != mark]
        networks = {n.split(":")[1] for n in changed if n.startswith("optimizer:")}
        gone = {n.split(":")[1] for n in self._seen.keys() - marks.keys()}  # optimisers' alone
        header = {
            "is_last": batch is None,
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

    def _state(self) -> State:
        flat = add_prefix("weights", self._weights) | add_prefix("kept", self.kept)
        for network, optimizer in self.optimizers.items():
            names = parameter_names(optimizer, _of(network, self._weights))
            flat |= add_prefix(f"optimizer:{network}", optimizer_state(optimizer, names))
        return flat


def alone(workload: Workload) -> Workload:
    """This process's part of a shared workload, for steps that the others must not take."""
    return workload._workload if isinstance(workload, SharedWorkload) else workload


def follow(workload: Workload, team: Team) -> None:
    """The others' side: take the leader's steps with it until it says stop.

    Args:
        workload: of this process, built as the leader's.
        team: that this process belongs to.
    """
    weights = _weights(workload)
    kept = workload.kept if isinstance(workload, Keeping) else {}
    while True:
        header, told = team.hear()
        with torch.no_grad():
            for name, value in select_prefix("weights", told).items():
                weights[name].copy_(value)
            for name, value in select_prefix("kept", told).items():
                kept[name].copy_(value)
        for network in header["optimizers"]:
            optimizer = workload.optimizers[network]
            names = parameter_names(optimizer, _of(network, weights))
            load_optimizer(optimizer, names, select_prefix(f"optimizer:{network}", told))
        for network, rates in header["rates"].items():
            groups = workload.optimizers[network].param_groups
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        if header["is_last"]:
            team.agree(_digest(workload))
            return
        _take_part(workload, team, header, Batch(**select_prefix("batch", told)))


def _take_part(workload: Workload, team: Team, header: Mapping[str, Any], batch: Batch) -> None:
    def average(names: Sequence[str]) -> None:
        gradients = _gradients(workload, names)
        team.average(gradients)
        if header["shares_gradients"]:
            team.share(gradients)
        keep_local(names)

    if isinstance(workload, Following):
        workload.begin(header["step"])
    draw = header["draw"]
    torch.manual_seed(derive_seed(draw, team.rank, "torch"))
    rng = NamedGenerators(draw, f"process {team.rank}")
    workload.step(_part(batch, team), rng, average)


def _weights(workload: Workload) -> State:
    """Every tensor of the networks, those that never travel included, sharing memory."""
    return {
        f"{network}/{name}": tensor.detach()
        for network, module in workload.networks.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def _of(network: str, weights: State) -> State:
    return {name: value for name, value in weights.items() if name.startswith(f"{network}/")}


def _marks(state: State) -> dict[str, tuple[int, int]]:
    """What tells whether a tensor was written to or replaced."""
    return {name: (value.data_ptr(), value._version) for name, value in state.items()}


def _gradients(workload: Workload, names: Sequence[str]) -> list[Tensor]:
    params = [p for name in names for p in workload.networks[name].parameters()]
    return [p.grad for p in params if p.grad is not None]


def _part(batch: Batch, team: Team) -> Batch:
    return Batch(*(tensor.chunk(team.size)[team.rank] for tensor in batch))


def _digest(workload: Workload) -> str:
    """Of all parameters: running statistics are the processes' own until the leader tells its."""
    return hash_state(
        {
            f"{network}/{name}": parameter
            for network, module in workload.networks.items()
            for name, parameter in module.named_parameters()
        }
    )
