"""Weights, gradients and moments of a site's processes in pieces, however they were cut.

No process can compute with its pieces alone. So whatever a network computes, all processes compute:
steps, and what the leader measures between them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fedwan.config import InnerConfig
from fedwan.site import joint
from fedwan.site.holding import Own, local
from fedwan.site.joint import JointHolding, norm_of_all
from fedwan.site.team import Team
from fedwan.state import State, network_of
from fedwan.workloads.base import Workload

__all__ = ["Cut", "Pieces", "PiecesHolding"]


class Cut(Protocol):
    """How networks come into pieces."""

    @property
    def cuts_batch(self) -> bool:
        """Whether processes share each step's batch, too; otherwise each computes all of it."""
        ...

    def cut(self, name: str, network: nn.Module) -> list[Tensor]:
        """Cut a network's parameters in place; what a backward pass makes gradients of."""
        ...

    def rest(self) -> None:
        """What had to stay whole until it was computed is in pieces again."""
        ...


class Pieces:
    """A workload's trained networks in pieces; `fedwan.workloads.descent.Others` for its descent.

    Args:
        workload: of this process, whose networks and optimisers are changed in place.
        team: that it belongs to.
        cut: how they are cut.

    Attributes:
        own: this process's holding, of pieces.
        team: the same.
        cuts_batch: whether processes share each step's batch, too.
    """

    keeps_gradients = True
    cuts_weights: Literal[True] = True

    def __init__(self, workload: Workload, team: Team, cut: Cut) -> None:
        self._leaves: dict[str, list[Tensor]] = {}
        for name, optimizer in workload.optimizers.items():
            network = workload.networks[name]
            names = {param: key for key, param in network.named_parameters()}
            stepped = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            self._leaves[name] = cut.cut(name, network)
            params = dict(network.named_parameters())
            for group, keys in zip(optimizer.param_groups, stepped, strict=True):
                group["params"] = [params[key] for key in keys]
        self._cut = cut
        self.own = Own(workload)
        self.team = team
        self.cuts_batch = cut.cuts_batch
        self._lent: dict[str, Tensor] = {}

    def leaves(self, network: str) -> Sequence[Tensor]:
        """See `Others`."""
        return self._leaves[network]

    def forget(self) -> None:
        """See `Others`."""

    def collect(self, network: str) -> None:
        """See `Others`: complete after the backward pass."""

    def settle(self, networks: Sequence[str]) -> None:
        """See `Others`."""
        self.rest()

    def rest(self) -> None:
        """Nothing is whole any more; to be called when what had to stay so is computed."""
        self._cut.rest()

    def kept(self, networks: Sequence[str]) -> list[Tensor]:
        """See `Others`."""
        params = [p for name, p in self.own.params.items() if network_of(name) in networks]
        return [local(param.grad) for param in params if param.grad is not None]

    def agree(self, is_fine: bool) -> bool:
        """See `Others`."""
        return int(self.team.sum(torch.tensor(int(not is_fine)))) == 0

    def norm(self, network: str) -> Tensor | None:
        """See `Others`."""
        return norm_of_all(self.own, self.team, network, with_twins=self.team.rank == 0)

    def whole(self, name: str) -> Tensor:
        """A tensor of a holding in host memory; to be called by all processes."""
        value = self.own.take(name)
        return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()

    def holding(self) -> PiecesHolding:
        """That of all processes, for the leader."""
        return PiecesHolding(self)

    def keep(self) -> None:
        """Remember this process's pieces of the weights."""
        params = {n: p.detach() for n, p in self.own.params.items() if isinstance(p, DTensor)}
        self._lent = {name: local(param).clone() for name, param in params.items()}

    def restore(self) -> None:
        """Have the pieces that were remembered."""
        for name, value in self._lent.items():
            local(self.own.params[name].detach()).copy_(value)
        self._lent = {}

    def serve(
        self, inner: Mapping[str, InnerConfig], header: Mapping[str, Any], told: State
    ) -> None:
        """Do what `PiecesHolding` asks a process for that is not the leader."""
        match header["do"]:
            case "take":
                self.whole(header["name"])
            case "put":
                self.own.put(header["name"], told["value"])
            case "norm":
                self.norm(header["network"])
            case "keep":
                self.keep()
            case "restore":
                self.restore()
            case _:
                joint.serve(self.own, self.team, inner, header)


class PiecesHolding(JointHolding):
    """Implements `fedwan.site.holding.Holding` for the leader.

    Args:
        pieces: of its process.
    """

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces.own, pieces.team)
        self._pieces = pieces

    def weights(self) -> State:
        """See `Holding`."""
        cut = {n: p for n, p in self._own.params.items() if isinstance(p, DTensor)}
        return {name: _nowhere(param) for name, param in cut.items()}

    def moments(self) -> State:
        """See `Holding`."""
        moments = self._own.moments()
        # Whole ones, too: what is written to them all processes have to write.
        return {name: _nowhere(value) for name, value in moments.items()}

    def take(self, name: str) -> Tensor:
        """See `Holding`; in host memory."""
        self._tell("take", name=name)
        return self._pieces.whole(name)

    def put(self, name: str, value: Tensor) -> None:
        """See `Holding`."""
        self._team.tell({"do": "put", "name": name}, {"value": value})
        self._own.put(name, value)

    def gradient_norm(self, network: str) -> Tensor | None:
        """See `Holding`."""
        self._tell("norm", network=network)
        return self._pieces.norm(network)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """See `Holding`."""
        self._tell("keep")
        self._pieces.keep()
        try:
            yield
        finally:
            self._tell("restore")
            self._pieces.restore()


def _nowhere(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
