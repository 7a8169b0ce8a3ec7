"""The moments and gradients that a site's processes share out, for the engine at the leader.

The leader asks for one tensor at a time, by a message that all others hear; who owns the tensor
sends it. So a checkpoint, or moments that travel, are never whole in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError
from fedwan.site.dealing import Shares
from fedwan.site.holding import GRADIENT, HeldBytes, Holding, Own, parameter_of
from fedwan.site.team import Team
from fedwan.state import State

__all__ = ["DealtHolding", "held_bytes", "joint_norm", "load_each", "serve"]


class DealtHolding:
    """Implements `fedwan.site.holding.Holding` for the leader.

    Args:
        shares: of its parameters.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._own = shares.own
        self._team = shares.team

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

    def load(self, moments: Mapping[str, Tensor]) -> None:
        """See `Holding`."""
        load_each(self, self._own, moments)

    def forget(self, parameters: Collection[str] | None = None) -> None:
        """See `Holding`."""
        self._tell("forget", names=None if parameters is None else sorted(parameters))
        self._own.forget(parameters)

    def begin(self, inner: Mapping[str, InnerConfig]) -> None:
        """See `Holding`."""
        if inner:
            self._tell("begin", networks=list(inner))
            self._own.begin(inner)

    def gradient_norm(self, network: str) -> Tensor | None:
        """See `Holding`."""
        if not self._shares.keeps_gradients:
            return self._own.gradient_norm(network)
        self._tell("norm", network=network)
        return joint_norm(self._own, self._team, network)

    def num_bytes(self) -> list[HeldBytes]:
        """What each process holds, the leader first."""
        self._tell("bytes")
        return held_bytes(self._own, self._team)

    def _owner(self, name: str) -> int:
        is_whole = f":{GRADIENT}|" in name and not self._shares.keeps_gradients
        return 0 if is_whole else self._shares.owners[parameter_of(name)]

    def _tell(self, do: str, **more: object) -> None:
        self._team.tell({"do": do, **more}, {})


def load_each(holding: Holding, own: Own, moments: Mapping[str, Tensor]) -> None:
    """See `Holding.load`: tensor by tensor.

    Args:
        holding: of all processes.
        own: of this process.
        moments: by name.

    Raises:
        CheckpointError: one is of a parameter that there is none of.
    """
    for name in moments:
        if parameter_of(name) not in own.params:
            raise CheckpointError(
                f"optimiser state is of parameter {parameter_of(name)!r}, which this model "
                "does not have; resume with the model that the run began with"
            )
    holding.forget()
    for name, value in moments.items():
        holding.put(name, value)


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
        case "forget":
            own.forget(header["names"])
        case "begin":
            own.begin({network: inner[network] for network in header["networks"]})
        case "norm":
            joint_norm(own, team, header["network"])
        case "bytes":
            held_bytes(own, team)


def held_bytes(own: Own, team: Team) -> list[HeldBytes]:
    """What each process holds; to be called by all of them."""
    table = torch.zeros(team.size, len(HeldBytes._fields), dtype=torch.int64)
    table[team.rank] = torch.tensor(own.num_bytes()[0])
    return [HeldBytes(*row) for row in team.sum(table).tolist()]


def joint_norm(own: Own, team: Team, network: str, *, with_twins: bool = True) -> Tensor | None:
    """Of a network's gradients, which processes keep in pieces; to be called by all of them."""
    norm = own.gradient_norm(network, with_twins=with_twins)
    some = next(iter(own.params.values()))
    pair = torch.zeros(2, device=some.device)
    if norm is not None:
        pair[0], pair[1] = norm.square(), 1.0
    square, count = team.sum(pair)
    return square.sqrt() if count else None
