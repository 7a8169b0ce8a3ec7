"""Weights, gradients and moments of a site's processes in pieces: ZeRO-3, by torch's `fully_shard`.

Each tensor is cut along its first dimension. A module's weights are whole only while it computes,
forward or backward (Rajbhandari et al. 2020, 1910.02054, section 5.3). So whatever a network
computes, all processes compute: steps, and what the leader measures between them, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fedwan.config import InnerConfig
from fedwan.site.dealt import held_bytes, joint_norm, load_each
from fedwan.site.holding import HeldBytes, Own, local
from fedwan.site.team import Team
from fedwan.state import State, network_of
from fedwan.workloads.base import Workload

__all__ = ["Split", "SplitHolding"]


class Split:
    """A workload's trained networks in pieces; `fedwan.workloads.descent.Others` for its descent.

    Args:
        workload: of this process, whose networks and optimisers are changed in place. A network
            that is differentiated twice is whole from its first forward pass to the end of a step.
        team: that it belongs to.
        device: of this process.
        twice: networks that are differentiated twice.

    Attributes:
        own: this process's holding, of pieces.
        team: the same.
    """

    keeps_gradients = True
    cuts_weights: Literal[True] = True

    def __init__(
        self, workload: Workload, team: Team, device: torch.device, twice: Collection[str]
    ) -> None:
        # No network of ours changes a layer's output in place, which is what it warns of.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        mesh = DeviceMesh(device.type, list(range(team.size)))
        self._leaves: dict[str, list[Tensor]] = {}
        for name, optimizer in workload.optimizers.items():
            network = workload.networks[name]
            names = {param: key for key, param in network.named_parameters()}
            stepped = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            self._leaves[name] = _split(network, mesh, stays=name in twice)
            params = dict(network.named_parameters())
            for group, keys in zip(optimizer.param_groups, stepped, strict=True):
                group["params"] = [params[key] for key in keys]
        self._staying = [workload.networks[name] for name in twice]
        self.own = Own(workload)
        self.team = team
        self._lent: dict[str, Tensor] = {}

    def leaves(self, network: str) -> Sequence[Tensor]:
        """See `Others`: the whole weights, which are there while they compute."""
        return self._leaves[network]

    def forget(self) -> None:
        """See `Others`."""

    def collect(self, network: str) -> None:
        """See `Others`: averaged in the backward pass."""

    def settle(self, networks: Sequence[str]) -> None:
        """See `Others`."""
        self.rest()

    def rest(self) -> None:
        """Nothing is whole any more; to be called when what had to stay so is computed."""
        for network in self._staying:
            for module in _cut_modules(network):
                module.reshard()

    def kept(self, networks: Sequence[str]) -> list[Tensor]:
        """See `Others`."""
        params = [p for name, p in self.own.params.items() if network_of(name) in networks]
        return [local(param.grad) for param in params if param.grad is not None]

    def agree(self, is_fine: bool) -> bool:
        """See `Others`."""
        return int(self.team.sum(torch.tensor(int(not is_fine)))) == 0

    def norm(self, network: str) -> Tensor | None:
        """See `Others`."""
        return joint_norm(self.own, self.team, network)

    def whole(self, name: str) -> Tensor:
        """A tensor of a holding in host memory; to be called by all processes."""
        value = self.own.take(name)
        return value.full_tensor().cpu() if isinstance(value, DTensor) else value

    def holding(self) -> SplitHolding:
        """That of all processes, for the leader."""
        return SplitHolding(self)

    def keep(self) -> None:
        """Remember this process's pieces of the weights."""
        self._lent = {n: local(p.detach()).clone() for n, p in self.own.params.items()}

    def restore(self) -> None:
        """Have the pieces that were remembered."""
        for name, value in self._lent.items():
            local(self.own.params[name].detach()).copy_(value)
        self._lent = {}

    def serve(
        self, inner: Mapping[str, InnerConfig], header: Mapping[str, Any], told: State
    ) -> None:
        """Do what `SplitHolding` asks a process for that is not the leader."""
        match header["do"]:
            case "take":
                self.whole(header["name"])
            case "put":
                self.own.put(header["name"], told["value"])
            case "forget":
                self.own.forget(header["names"])
            case "begin":
                self.own.begin({network: inner[network] for network in header["networks"]})
            case "norm":
                self.norm(header["network"])
            case "bytes":
                held_bytes(self.own, self.team)
            case "keep":
                self.keep()
            case "restore":
                self.restore()


class SplitHolding:
    """Implements `fedwan.site.holding.Holding` for the leader.

    Args:
        split: of its process.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        self._own = split.own

    def weights(self) -> State:
        """See `Holding`."""
        return {name: _nowhere(param) for name, param in self._own.params.items()}

    def moments(self) -> State:
        """See `Holding`."""
        moments = self._own.moments()
        return {n: _nowhere(v) if isinstance(v, DTensor) else v for n, v in moments.items()}

    def take(self, name: str) -> Tensor:
        """See `Holding`; in host memory."""
        self._tell("take", name=name)
        return self._split.whole(name)

    def put(self, name: str, value: Tensor) -> None:
        """See `Holding`."""
        self._split.team.tell({"do": "put", "name": name}, {"value": value})
        self._own.put(name, value)

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
        self._tell("norm", network=network)
        return self._split.norm(network)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """See `Holding`."""
        self._tell("keep")
        self._split.keep()
        try:
            yield
        finally:
            self._tell("restore")
            self._split.restore()

    def num_bytes(self) -> list[HeldBytes]:
        """What each process holds, the leader first."""
        self._tell("bytes")
        return held_bytes(self._own, self._split.team)

    def _tell(self, do: str, **more: object) -> None:
        self._split.team.tell({"do": do, **more}, {})


def _split(network: nn.Module, mesh: DeviceMesh, *, stays: bool) -> list[Tensor]:
    """Cut a network's parameters into pieces; what they are while they are whole."""
    modules = [m for m in network.modules() if m is not network]
    for module in reversed(modules):
        if next(module.parameters(recurse=False), None) is not None:
            fully_shard(module, mesh=mesh, reshard_after_forward=not stays)
    fully_shard(network, mesh=mesh, reshard_after_forward=not stays)
    leaves: list[Tensor] = []
    for module in _cut_modules(network):
        if stays:
            module.set_reshard_after_backward(False, recurse=False)
        module.unshard()  # module by module: never whole at once
        leaves += module.parameters(recurse=False)
        module.reshard()
    return leaves


def _cut_modules(network: nn.Module) -> list[Any]:
    """Those that have pieces of their own: modules, and `FSDPModule`."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def _nowhere(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
