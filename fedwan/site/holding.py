"""What a process holds of its workload's gradients and inner optimisers, tensor by tensor.

A tensor's name is `network:field|parameter`, as in `velocity:exp_avg|velocity/net.0.weight`; the
gradient itself is the field `gradient`. A site's one process holds all of them. Where processes
share them out (`site.partition`), each has such a holding, and the leader's stands for all of
theirs (`fedwan.site.dealt`): the engine asks either for a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.optim_state import load_optimizer, optimizer_state, parameter_names
from fedwan.state import State, add_prefix, select_prefix
from fedwan.workloads.base import Workload
from fedwan.workloads.moments import begin_moments
from fedwan.workloads.optim import full_norm

__all__ = [
    "GRADIENT",
    "WEIGHT",
    "Dealt",
    "HeldBytes",
    "Holding",
    "Own",
    "holding_of",
    "is_cut",
    "is_sharded",
    "local",
    "parameter_of",
]

GRADIENT = "gradient"
"""The field of a gradient."""
WEIGHT = "weight"
"""That of a parameter itself, where it lies in pieces."""


class HeldBytes(NamedTuple):
    """Bytes that a process holds between two steps."""

    weights: int
    gradients: int
    moments: int


class Holding(Protocol):
    """The gradients and moments of a workload, wherever they lie."""

    def weights(self) -> State:
        """Parameters of which this process has a piece at most, on `meta`, by parameter."""
        ...

    def moments(self) -> State:
        """All moments by name, sharing memory; on `meta` those that lie with other processes."""
        ...

    def take(self, name: str) -> Tensor:
        """A moment, gradient or weight, whole; zeros for a gradient that there is none of."""
        ...

    def put(self, name: str, value: Tensor) -> None:
        """Write a copy of a value into one, or make a moment or gradient of it."""
        ...

    def load(self, moments: Mapping[str, Tensor]) -> None:
        """Have these moments and no others.

        Raises:
            CheckpointError: one is of a parameter that there is none of.
        """
        ...

    def forget(self, parameters: Collection[str] | None = None) -> None:
        """Drop the moments of these parameters, or all."""
        ...

    def begin(self, inner: Mapping[str, InnerConfig]) -> None:
        """Give the parameters of these networks moments of zero steps where they have none."""
        ...

    def gradient_norm(self, network: str) -> Tensor | None:
        """Norm of a network's gradients, (); None if there are none."""
        ...

    def lending(self) -> AbstractContextManager[None]:
        """What `weights` names is as it was, afterwards."""
        ...

    def num_bytes(self) -> list[HeldBytes]:
        """What each process holds, the leader first."""
        ...


@runtime_checkable
class Dealt(Protocol):
    """A workload whose steps several processes take, and may share gradients and moments out."""

    @property
    def holding(self) -> Holding:
        """That of all processes together."""
        ...


class Own:
    """The holding of one process: see `Holding`.

    Args:
        workload: of this process.
        owned: parameters that it has moments of; None for all.
    """

    def __init__(self, workload: Workload, owned: Collection[str] | None = None) -> None:
        self._workload = workload
        self.params: dict[str, nn.Parameter] = {
            f"{network}/{name}": param
            for network in workload.optimizers
            for name, param in workload.networks[network].named_parameters()
        }
        self._owned = self.params.keys() if owned is None else owned

    def weights(self) -> State:
        """See `Holding`: none."""
        return {}

    def lending(self) -> AbstractContextManager[None]:
        """See `Holding`."""
        return nullcontext()

    def moments(self) -> State:
        """See `Holding`."""
        flat: State = {}
        for network, optimizer in self._workload.optimizers.items():
            flat |= add_prefix(network, optimizer_state(optimizer, self._names(network)))
        return flat

    def take(self, name: str) -> Tensor:
        """See `Holding`."""
        network, field, parameter = _parts(name)
        param = self.params[parameter]
        if field == WEIGHT:
            return param.detach()
        if field == GRADIENT:
            return torch.zeros_like(param).detach() if param.grad is None else param.grad.detach()
        value: Tensor = self._workload.optimizers[network].state[param][field]
        return value

    def put(self, name: str, value: Tensor) -> None:
        """See `Holding`."""
        network, field, parameter = _parts(name)
        param = self.params[parameter]
        # A clone: an optimiser writes to it, and what it came from must not change.
        value = value.detach().clone()
        if field in (WEIGHT, GRADIENT):
            value = value.to(param.dtype)
        if field != "step":  # which stays where it is, as torch's own `load_state_dict` has it
            value = _cut_like(value.to(param.device), param)
        if field == WEIGHT:
            param.detach().copy_(value)
        elif field == GRADIENT:
            param.grad = value
        else:
            self._workload.optimizers[network].state[param][field] = value

    def load(self, moments: Mapping[str, Tensor]) -> None:
        """See `Holding`."""
        for network, optimizer in self._workload.optimizers.items():
            load_optimizer(optimizer, self._names(network), select_prefix(network, moments))

    def forget(self, parameters: Collection[str] | None = None) -> None:
        """See `Holding`."""
        for network, optimizer in self._workload.optimizers.items():
            if parameters is None:
                optimizer.state.clear()
                continue
            for name in self._names(network):
                if name in parameters:
                    optimizer.state.pop(self.params[name], None)

    def begin(self, inner: Mapping[str, InnerConfig]) -> None:
        """See `Holding`."""
        for network, config in inner.items():
            names = self._names(network)
            mine = [self.params[name] for name in names if name in self._owned]
            trained = [param for param in mine if param.requires_grad]
            begin_moments(config, self._workload.optimizers[network], trained)

    def gradient_norm(self, network: str, *, with_twins: bool = True) -> Tensor | None:
        """See `Holding`; of pieces, with or without what every process has alike."""
        gradients = self._gradients([network])
        if not with_twins:
            gradients = [gradient for gradient in gradients if is_sharded(gradient)]
        if not gradients:
            return None
        norms = torch.stack([full_norm(local(gradient)) for gradient in gradients])
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def num_bytes(self) -> list[HeldBytes]:
        """See `Holding`: of this process alone."""
        weights = [param.detach() for param in self.params.values()]
        gradients = self._gradients(self._workload.optimizers)
        return [HeldBytes(*map(_num_bytes, (weights, gradients, self.moments().values())))]

    def _gradients(self, networks: Iterable[str]) -> list[Tensor]:
        groups = (g for n in networks for g in self._workload.optimizers[n].param_groups)
        params = (param for group in groups for param in group["params"])
        return [param.grad.detach() for param in params if param.grad is not None]

    def _names(self, network: str) -> list[str]:
        names = {param: name for name, param in self.params.items()}
        groups = self._workload.optimizers[network].param_groups
        params = [param for group in groups for param in group["params"]]
        if not all(param in names for param in params):
            tensors = {name: param.detach() for name, param in self.params.items()}
            return parameter_names(self._workload.optimizers[network], tensors)
        return [names[param] for param in params]


def holding_of(workload: Workload) -> Holding:
    """The gradients and moments of a workload, wherever they lie."""
    return workload.holding if isinstance(workload, Dealt) else Own(workload)


def parameter_of(name: str) -> str:
    """The parameter that a moment or gradient is of.

    >>> parameter_of("velocity:exp_avg|velocity/net.0.weight")
    'velocity/net.0.weight'
    """
    return name.partition("|")[2]


def _parts(name: str) -> tuple[str, str, str]:
    """Network, field and parameter."""
    head, _, parameter = name.partition("|")
    network, _, field = head.rpartition(":")
    return network, field, parameter


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies with this process, sharing memory."""
    piece: Tensor = tensor.to_local() if is_cut(tensor) else tensor  # type: ignore[attr-defined]
    return piece


def is_cut(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`, which takes half a second to import where there is none."""
    return hasattr(tensor, "to_local")


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes have other values of it."""
    return is_cut(tensor) and any(p.is_shard() for p in tensor.placements)  # type: ignore[attr-defined]


def _cut_like(value: Tensor, param: Tensor) -> Tensor:
    """This process's piece of a value, if the parameter is in pieces."""
    if not is_cut(param):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(param, DTensor)
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory that these tensors, or pieces of them, lie in."""
    blocks = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({block.data_ptr(): block.nbytes() for block in blocks}.values())
