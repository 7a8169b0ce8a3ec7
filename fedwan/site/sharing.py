"""A workload whose steps several processes of a site take together; the engine sees one workload.

The leader's process runs the site: it alone has the shard, the link and the checkpoints. Before
each step it tells the others what has changed in its weights and optimisers since they all stepped
(what a landing wrote, fragment by fragment, or a checkpoint), and hands out the batch. All compute
their parts; gradients are averaged where `Reduce` is called, so that any recipe may be shared; and
every process takes the same optimiser step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.optim_state import load_optimizer, optimizer_state, parameter_names
from fedwan.rng import NamedGenerators, derive_seed
from fedwan.site.dealing import GradientPieces, Shares, Turns
from fedwan.site.dealt import DealtHolding, serve
from fedwan.site.holding import Holding, Own
from fedwan.site.team import Team
from fedwan.state import State, add_prefix, hash_state, select_prefix
from fedwan.workloads.base import Batch, Following, Keeping, Reduce, Workload, keep_local
from fedwan.workloads.descent import Descending

__all__ = ["SharedWorkload", "alone", "follow", "share_out"]


def share_out(workload: Workload, team: Team, shard: str) -> Shares | None:
    """Share out what `site.shard` says, among the processes of a team; None if that is nothing.

    Args:
        workload: of this process, whose optimisers and parameters are hooked into.
        team: that this process belongs to; all of them call this.
        shard: the setting.
    """
    if shard == "none":
        return None
    assert isinstance(workload, Descending), "what follows site.shard has a descent"
    shares = Shares(workload, team, keeps_gradients=shard == "gradients")
    Turns(workload, shares)
    if shares.keeps_gradients:
        workload.descent.others = GradientPieces(shares)
    return shares


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
        self, workload: Workload, team: Team, shares: Shares | None, *, shares_gradients: bool
    ) -> None:
        self._workload = workload
        self._team = team
        self._shares = shares
        self._shares_gradients = shares_gradients
        self._weights = _weights(workload)
        self._seen: dict[str, tuple[int, int]] = {}
        self._untold: set[str] = set()
        self._step = 0
        self.holding: Holding = Own(workload) if shares is None else DealtHolding(shares)
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
            _average(self._workload, self._team, self._shares, names)
            if self._shares_gradients:
                self._reduce(names, reduce)
            else:
                reduce(names)

        losses = self._workload.step(_part(batch, self._team), rng, average)
        marks = _marks(self._state())
        self._seen = {name: mark for name, mark in marks.items() if name not in self._untold}
        self._untold.clear()
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
        marks = _marks(state)
        changed = [name for name, mark in marks.items() if self._seen.get(name) != mark]
        networks = {n.split(":")[1] for n in changed if n.startswith("optimizer:")}
        gone = {n.split(":")[1] for n in self._seen.keys() - marks.keys()}  # optimisers' alone
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

    def _state(self) -> State:
        """What all processes have alike."""
        flat = add_prefix("weights", self._weights) | add_prefix("kept", self.kept)
        for network, optimizer in self.optimizers.items() if self._shares is None else ():
            names = parameter_names(optimizer, _of(network, self._weights))
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
        with workload._shares.alone():
            yield workload._workload


def follow(
    workload: Workload, team: Team, shares: Shares | None, inner: Mapping[str, InnerConfig]
) -> None:
    """The others' side: take the leader's steps with it until it says stop.

    Args:
        workload: of this process, built as the leader's.
        team: that this process belongs to.
        shares: what `share_out` gave.
        inner: settings by network.
    """
    weights = _weights(workload)
    while True:
        header, told = _next(team, shares, inner, until=("step", "stop"))
        _take_over(workload, weights, header, told)
        if header["do"] == "stop":
            team.agree(_digest(workload))
            return
        _take_part(workload, team, shares, inner, header, told)


def _next(
    team: Team, shares: Shares | None, inner: Mapping[str, InnerConfig], until: Sequence[str]
) -> tuple[dict[str, Any], State]:
    """The leader's next message of these kinds; others are served meanwhile."""
    while True:
        header, told = team.hear()
        if header["do"] in until:
            return header, told
        assert shares is not None, header["do"]
        serve(shares, inner, header)


def _take_over(workload: Workload, weights: State, header: Mapping[str, Any], told: State) -> None:
    """Have what the leader has told."""
    kept = workload.kept if isinstance(workload, Keeping) else {}
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


def _take_part(
    workload: Workload,
    team: Team,
    shares: Shares | None,
    inner: Mapping[str, InnerConfig],
    header: Mapping[str, Any],
    told: State,
) -> None:
    def average(names: Sequence[str]) -> None:
        _average(workload, team, shares, names)
        if header["shares_gradients"]:
            _, gradients = _next(team, shares, inner, until=("go",))
            if not _in_pieces(shares):
                _set_gradients(workload, names, gradients)
        keep_local(names)

    if isinstance(workload, Following):
        workload.begin(header["step"])
    draw = header["draw"]
    torch.manual_seed(derive_seed(draw, team.rank, "torch"))
    rng = NamedGenerators(draw, f"process {team.rank}")
    batch = Batch(**select_prefix("batch", told))
    workload.step(_part(batch, team), rng, average)


def _average(workload: Workload, team: Team, shares: Shares | None, names: Sequence[str]) -> None:
    """Replace gradients by their mean over all processes, unless they are that already."""
    if not _in_pieces(shares):
        team.average(list(_gradients(workload, names).values()))


def _in_pieces(shares: Shares | None) -> bool:
    return shares is not None and shares.keeps_gradients


def _whole_gradients(workload: Workload, shares: Shares | None, names: Sequence[str]) -> State:
    return {} if _in_pieces(shares) else _gradients(workload, names)


def _set_gradients(workload: Workload, networks: Sequence[str], gradients: State) -> None:
    """Have these gradients and no others."""
    for network in networks:
        for name, param in workload.networks[network].named_parameters():
            param.grad = gradients.get(f"{network}/{name}")


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


def _gradients(workload: Workload, networks: Sequence[str]) -> State:
    """Those that there are, by parameter."""
    return {
        f"{network}/{name}": param.grad
        for network in networks
        for name, param in workload.networks[network].named_parameters()
        if param.grad is not None
    }


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
