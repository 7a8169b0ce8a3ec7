"""What the processes of a site have in common, whoever leads: see `fedwan.site.sharing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedwan.site.dealing import GradientPieces, Shares, Turns
from fedwan.site.holding import is_cut
from fedwan.site.team import Team
from fedwan.state import State, hash_state
from fedwan.workloads.base import Batch, Workload
from fedwan.workloads.descent import Descending

if TYPE_CHECKING:
    from fedwan.site.splitting import Split

__all__ = [
    "average_gradients",
    "digest",
    "gradients_of",
    "in_pieces",
    "of_network",
    "part_of",
    "share_out",
    "whole_weights",
]


def share_out(
    workload: Workload, team: Team, partition: str, device: torch.device
) -> Shares | Split | None:
    """Share out what `site.partition` says, among the processes of a team; None if that is nothing.

    Args:
        workload: of this process; its optimisers and parameters are hooked into, or changed.
        team: that this process belongs to; all of them call this.
        partition: the setting.
        device: of this process.
    """
    if partition == "none":
        return None
    assert isinstance(workload, Descending), "what follows site.partition has a descent"
    if partition == "weights":
        # Imported here: it takes most of a second, which every other site would wait for.
        from fedwan.site.splitting import Split

        split = Split(workload, team, device, workload.descent.twice)
        workload.descent.others = split
        return split
    shares = Shares(workload, team, keeps_gradients=partition == "gradients")
    Turns(workload, shares)
    if shares.keeps_gradients:
        workload.descent.others = GradientPieces(shares)
    return shares


def average_gradients(
    workload: Workload, team: Team, shares: Shares | Split | None, names: Sequence[str]
) -> None:
    """Replace gradients by their mean over all processes, unless they are that already."""
    if not in_pieces(shares):
        team.average(list(gradients_of(workload, names).values()))


def in_pieces(shares: Shares | Split | None) -> bool:
    """Whether averaged gradients are shared out."""
    return shares is not None and shares.keeps_gradients


def whole_weights(workload: Workload) -> State:
    """Every tensor that is whole, those that never travel included, sharing memory."""
    return {
        f"{network}/{name}": tensor.detach()
        for network, module in workload.networks.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if not is_cut(tensor)
    }


def of_network(network: str, weights: State) -> State:
    """Those of one network."""
    return {name: value for name, value in weights.items() if name.startswith(f"{network}/")}


def gradients_of(workload: Workload, networks: Sequence[str]) -> State:
    """Those that there are, by parameter."""
    return {
        f"{network}/{name}": param.grad
        for network in networks
        for name, param in workload.networks[network].named_parameters()
        if param.grad is not None
    }


def part_of(batch: Batch, team: Team) -> Batch:
    """This process's part of a batch."""
    return Batch(*(tensor.chunk(team.size)[team.rank] for tensor in batch))


def digest(workload: Workload) -> str:
    """Of parameters that are whole: running statistics are processes' own until the leader's."""
    return hash_state(
        {
            f"{network}/{name}": parameter
            for network, module in workload.networks.items()
            for name, parameter in module.named_parameters()
            if not is_cut(parameter)
        }
    )
