"""What the processes of a site have in common, whoever leads: see `fedwan.site.sharing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedwan.rng import NamedGenerators, derive_seed, seed_torch
from fedwan.site.dealing import GradientPieces, Shares, Turns
from fedwan.site.holding import is_cut, is_sharded, local
from fedwan.site.team import Team
from fedwan.state import State, hash_state
from fedwan.workloads.base import Batch, Workload
from fedwan.workloads.descent import Descending

if TYPE_CHECKING:
    from fedwan.site.pieces import Pieces

__all__ = [
    "average_gradients",
    "cuts_batch",
    "digest",
    "gradients_of",
    "in_pieces",
    "of_network",
    "part_of",
    "same_draws",
    "share_out",
    "whole_weights",
]


def share_out(
    workload: Workload, team: Team, partition: str, device: torch.device
) -> Shares | Pieces | None:
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
    if partition in ("weights", "tensor_parallel"):
        # Imported here: it takes most of a second, which every other site would wait for.
        from fedwan.site.pieces import Cut, Pieces

        cut: Cut
        if partition == "weights":
            from fedwan.site.splitting import FullyShard

            cut = FullyShard(device, team.size, workload.descent.twice)
        else:
            from fedwan.site.parallel import TensorParallel

            cut = TensorParallel(device, team.size)
        pieces = Pieces(workload, team, cut)
        workload.descent.others = pieces
        return pieces
    shares = Shares(workload, team, keeps_gradients=partition == "gradients")
    Turns(workload, shares)
    if shares.keeps_gradients:
        workload.descent.others = GradientPieces(shares)
    return shares


def average_gradients(
    workload: Workload, team: Team, shares: Shares | Pieces | None, names: Sequence[str]
) -> None:
    """Replace gradients by their mean over all processes, unless they are that already."""
    if not in_pieces(shares):
        team.average(list(gradients_of(workload, names).values()))


def in_pieces(shares: Shares | Pieces | None) -> bool:
    """Whether each process has the complete gradients that it steps on, and may have no others."""
    return shares is not None and shares.keeps_gradients


def cuts_batch(shares: Shares | Pieces | None) -> bool:
    """Whether processes share each step's batch."""
    return shares is None or shares.cuts_batch


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


def part_of(batch: Batch, team: Team, shares: Shares | Pieces | None) -> Batch:
    """This process's part of a batch, or all of it where all compute that."""
    if not cuts_batch(shares):
        return batch
    return Batch(*(tensor.chunk(team.size)[team.rank] for tensor in batch))


def same_draws(draw: int) -> NamedGenerators:
    """For a step that all processes compute alike, from what the leader has drawn for it.

    Seeds torch's global generators, too.
    """
    seed_torch(derive_seed(draw, "team", "torch"))
    return NamedGenerators(draw, "team")


def digest(workload: Workload) -> str:
    """Of parameters that all have alike: running statistics are each process's own for a while."""
    return hash_state(
        {
            f"{network}/{name}": local(parameter.detach())
            for network, module in workload.networks.items()
            for name, parameter in module.named_parameters()
            if not is_sharded(parameter)
        }
    )
