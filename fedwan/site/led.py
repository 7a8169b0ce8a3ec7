"""The side of a site's processes that do not lead: see `fedwan.site.sharing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.optim_state import load_optimizer, parameter_names
from fedwan.rng import NamedGenerators, derive_seed
from fedwan.site.common import (
    average_gradients,
    cuts_batch,
    digest,
    in_pieces,
    of_network,
    part_of,
    same_draws,
    whole_weights,
)
from fedwan.site.dealing import Shares
from fedwan.site.dealt import serve
from fedwan.site.team import Team
from fedwan.state import State, select_prefix
from fedwan.workloads.base import Batch, Following, Keeping, Workload, keep_local

if TYPE_CHECKING:
    from fedwan.site.pieces import Pieces

__all__ = ["follow"]


def follow(
    workload: Workload, team: Team, shares: Shares | Pieces | None, inner: Mapping[str, InnerConfig]
) -> None:
    """The others' side: take the leader's steps with it until it says stop.

    Args:
        workload: of this process, built as the leader's.
        team: that this process belongs to.
        shares: what `share_out` gave.
        inner: settings by network.
    """
    weights = whole_weights(workload)
    while True:
        header, told = _next(workload, team, shares, inner, until=("step", "stop"))
        _take_over(workload, weights, header, told)
        if header["do"] == "stop":
            team.agree(digest(workload))
            return
        _take_part(workload, team, shares, inner, header, told)


def _next(
    workload: Workload,
    team: Team,
    shares: Shares | Pieces | None,
    inner: Mapping[str, InnerConfig],
    until: Sequence[str],
) -> tuple[dict[str, Any], State]:
    """The leader's next message of these kinds; others are served meanwhile."""
    while True:
        header, told = team.hear()
        if header["do"] in until:
            return header, told
        assert shares is not None, header["do"]
        if header["do"] in ("sample", "evaluate"):
            assert shares.cuts_weights
            _compute(workload, header, told)
            shares.rest()
        elif shares.cuts_weights:
            shares.serve(inner, header, told)
        else:
            serve(shares, inner, header)


@torch.no_grad()
def _compute(workload: Workload, header: Mapping[str, Any], told: State) -> None:
    """What the leader computes between steps, for the pieces of weights that are here."""
    modes = {name: network.training for name, network in workload.networks.items()}
    _write(select_prefix("weights", told), whole_weights(workload))
    asked = select_prefix("asked", told)
    try:
        for name, is_training in header["modes"].items():
            workload.networks[name].train(is_training)
        if header["do"] == "sample":
            workload.sample(header["num"], header["seed"])
        else:
            workload.evaluate(Batch(**asked), header["seed"])
    finally:
        for name, is_training in modes.items():
            workload.networks[name].train(is_training)


def _take_over(workload: Workload, weights: State, header: Mapping[str, Any], told: State) -> None:
    """Have what the leader has told."""
    kept = workload.kept if isinstance(workload, Keeping) else {}
    _write(select_prefix("weights", told), weights)
    _write(select_prefix("kept", told), kept)
    for network in header["optimizers"]:
        optimizer = workload.optimizers[network]
        names = parameter_names(optimizer, of_network(network, weights))
        load_optimizer(optimizer, names, select_prefix(f"optimizer:{network}", told))
    for network, rates in header["rates"].items():
        groups = workload.optimizers[network].param_groups
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


@torch.no_grad()
def _write(values: State, tensors: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        tensors[name].copy_(value)


def _take_part(
    workload: Workload,
    team: Team,
    shares: Shares | Pieces | None,
    inner: Mapping[str, InnerConfig],
    header: Mapping[str, Any],
    told: State,
) -> None:
    def average(names: Sequence[str]) -> None:
        average_gradients(workload, team, shares, names)
        if header["shares_gradients"]:
            _, gradients = _next(workload, team, shares, inner, until=("go",))
            if not in_pieces(shares):
                _set_gradients(workload, names, gradients)
        keep_local(names)

    if isinstance(workload, Following):
        workload.begin(header["step"])
    draw = header["draw"]
    if cuts_batch(shares):
        torch.manual_seed(derive_seed(draw, team.rank, "torch"))
        rng = NamedGenerators(draw, f"process {team.rank}")
    else:
        rng = same_draws(draw)
    batch = Batch(**select_prefix("batch", told))
    workload.step(part_of(batch, team, shares), rng, average)


def _set_gradients(workload: Workload, networks: Sequence[str], gradients: State) -> None:
    """Have these gradients and no others."""
    for network in networks:
        for name, param in workload.networks[network].named_parameters():
            param.grad = gradients.get(f"{network}/{name}")
