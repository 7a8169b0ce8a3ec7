"""The moments and gradients that a site's processes share out, for the engine at the leader.

The leader asks for one tensor at a time, by a message that all others hear; who owns the tensor
sends it. So a checkpoint, or moments that travel, are never whole in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.site import joint
from fedwan.site.dealing import Shares
from fedwan.site.holding import GRADIENT, parameter_of
from fedwan.site.joint import JointHolding, norm_of_all
from fedwan.state import State

__all__ = ["DealtHolding", "serve"]


class DealtHolding(JointHolding):
    """Implements `fedwan.site.holding.Holding` for the leader.

    Args:
        shares: of its parameters.
    """

    def __init__(self, shares: Shares) -> None:
        super().__init__(shares.own, shares.team)
        self._shares = shares

    def weights(self) -> State:
        """See `Holding`: none."""
        return self._own.weights()

    def lending(self) -> AbstractContextManager[None]:
        """See `Holding`."""
        return self._own.lending()

    def moments(self) -> State:
        """See `Holding`."""
        self._tell("list")
        flat = self._own.moments()
        for rank in range(1, self._team.size):
            header, _ = self._team.receive(rank)
            for name, dtype, shape in header["moments"]:
                flat[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        return flat

    def take(self, name: str) -> Tensor:
        """See `Holding`."""
        rank = self._owner(name)
        if rank == 0:
            return self._own.take(name)
        self._tell("take", name=name, rank=rank)
        _, tensors = self._team.receive(rank)
        return tensors[name]

    def put(self, name: str, value: Tensor) -> None:
        """See `Holding`."""
        rank = self._owner(name)
        if rank == 0:
            self._own.put(name, value)
            return
        self._tell("put", rank=rank)
        self._team.send(rank, {}, {name: value.detach()})

    def gradient_norm(self, network: str) -> Tensor | None:
        """See `Holding`."""
        if not self._shares.keeps_gradients:
            return self._own.gradient_norm(network)
        self._tell("norm", network=network)
        return norm_of_all(self._own, self._team, network)

    def _owner(self, name: str) -> int:
        is_whole = f":{GRADIENT}|" in name and not self._shares.keeps_gradients
        return 0 if is_whole else self._shares.owners[parameter_of(name)]


def serve(shares: Shares, inner: Mapping[str, InnerConfig], header: Mapping[str, Any]) -> None:
    """Do what `DealtHolding` asks a process for that is not the leader.

    Args:
        shares: of its parameters.
        inner: settings by network.
        header: of the leader's message.
    """
    own, team = shares.own, shares.team
    match header["do"]:
        case "list":
            rows = [[n, str(v.dtype)[6:], list(v.shape)] for n, v in own.moments().items()]
            team.send(0, {"moments": rows}, {})
        case "take" if header["rank"] == team.rank:
            team.send(0, {}, {header["name"]: own.take(header["name"])})
        case "put" if header["rank"] == team.rank:
            for name, value in team.receive(0)[1].items():
                own.put(name, value)
        case "norm":
            norm_of_all(own, team, header["network"])
        case _:
            joint.serve(own, team, inner, header)
