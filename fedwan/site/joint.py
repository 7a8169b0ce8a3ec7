"""What a site's processes do together with their moments and gradients, however these lie there.

The leader says what it wants by a message that all others hear, and all do it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError
from fedwan.site.holding import HeldBytes, Own, parameter_of
from fedwan.site.team import Team

__all__ = ["JointHolding", "norm_of_all", "serve"]


class JointHolding(ABC):
    """What every `fedwan.site.holding.Holding` of several processes has, for the leader.

    Args:
        own: what the leader holds.
        team: the processes.
    """

    def __init__(self, own: Own, team: Team) -> None:
        self._own = own
        self._team = team

    @abstractmethod
    def put(self, name: str, value: Tensor) -> None:
        """See `Holding`."""

    def load(self, moments: Mapping[str, Tensor]) -> None:
        """See `Holding`: tensor by tensor.

        Raises:
            CheckpointError: one is of a parameter that there is none of.
        """
        for name in moments:
            if parameter_of(name) not in self._own.params:
                raise CheckpointError(
                    f"optimiser state is of parameter {parameter_of(name)!r}, which this model "
                    "does not have; resume with the model that the run began with"
                )
        self.forget()
        for name, value in moments.items():
            self.put(name, value)

    def forget(self, parameters: Collection[str] | None = None) -> None:
        """See `Holding`."""
        self._tell("forget", names=None if parameters is None else sorted(parameters))
        self._own.forget(parameters)

    def begin(self, inner: Mapping[str, InnerConfig]) -> None:
        """See `Holding`."""
        if inner:
            self._tell("begin", networks=list(inner))
            self._own.begin(inner)

    def num_bytes(self) -> list[HeldBytes]:
        """What each process holds, the leader first."""
        self._tell("bytes")
        return _held_bytes(self._own, self._team)

    def _tell(self, do: str, **more: object) -> None:
        self._team.tell({"do": do, **more}, {})


def serve(
    own: Own, team: Team, inner: Mapping[str, InnerConfig], header: Mapping[str, Any]
) -> None:
    """Do what `JointHolding` asks a process for that is not the leader.

    Args:
        own: what it holds.
        team: the processes.
        inner: settings by network.
        header: of the leader's message.
    """
    match header["do"]:
        case "forget":
            own.forget(header["names"])
        case "begin":
            own.begin({network: inner[network] for network in header["networks"]})
        case "bytes":
            _held_bytes(own, team)


def _held_bytes(own: Own, team: Team) -> list[HeldBytes]:
    """What each process holds; to be called by all."""
    table = torch.zeros(team.size, len(HeldBytes._fields), dtype=torch.int64)
    table[team.rank] = torch.tensor(own.num_bytes()[0])
    return [HeldBytes(*row) for row in team.sum(table).tolist()]


def norm_of_all(own: Own, team: Team, network: str, *, with_twins: bool = True) -> Tensor | None:
    """Of a network's gradients, which processes keep in pieces; to be called by all of them."""
    norm = own.gradient_norm(network, with_twins=with_twins)
    some = next(iter(own.params.values()))
    pair = torch.zeros(2, device=some.device)
    if norm is not None:
        pair[0], pair[1] = norm.square(), 1.0
    square, count = team.sum(pair)
    return square.sqrt() if count else None
