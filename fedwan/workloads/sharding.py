"""A recipe's steps over several processes of a site, as torchrun started them.

none        every process has all weights, and its part of each batch; gradients are averaged
gradients   FSDP2 without resharding after the forward pass: optimiser states and gradients in
            pieces (ZeRO-2; Rajbhandari et al. 2020, 1910.02054, section 5)
weights     FSDP2: weights, too (ZeRO-3)
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.pieces import reshard


class Processes:
    """The processes that take a recipe's steps together; one where torchrun started no more."""

    def __init__(self, partition: str, device: torch.device) -> None:
        dist = torch.distributed
        is_many = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if is_many else (0, 1)
        self._partition = partition if self.size > 1 else "none"
        self._device = device
        self._staying: list[nn.Module] = []
        self._leaves: dict[str, list[Tensor]] = {}

    def shard(self, networks: Mapping[str, nn.Module], twice: Collection[str]) -> None:
        """Cut networks in place, before their optimisers are built."""
        if self._partition == "none":
            return
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self._device.type, (self.size,))
        self._staying = [networks[name] for name in twice]
        keeps = self._partition == "gradients"
        for name, network in networks.items():
            self._leaves[name] = _fully_shard(network, mesh, name in twice, keeps=keeps)

    def leaves(self, name: str, network: nn.Module) -> list[Tensor]:
        """Tensors whose gradients a backward pass of one network makes."""
        return self._leaves.get(name) or [p for p in network.parameters() if p.requires_grad]

    def settle(self, params: Sequence[nn.Parameter]) -> None:
        """All backward passes are over: gradients are averaged, and nothing stays whole."""
        reshard(self._staying)
        if self._partition != "none" or self.size == 1:
            return
        gradients = [param.grad for param in params if param.grad is not None]
        sums = [torch.distributed.all_reduce(gradient, async_op=True) for gradient in gradients]
        for gradient, on_its_way in zip(gradients, sums, strict=True):
            on_its_way.wait()
            gradient /= self.size


def _fully_shard(network: nn.Module, mesh: Any, stays: bool, *, keeps: bool) -> list[Tensor]:
    """Cut a network; what a backward pass makes gradients of."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    # No network of ours changes a layer's output in place, which is what it warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    modules = [m for m in network.modules() if m is not network]
    with_params = [m for m in modules if next(m.parameters(recurse=False), None) is not None]
    for module in (*reversed(with_params), network):
        fully_shard(module, mesh=mesh, reshard_after_forward=not (stays or keeps))
    leaves: list[Tensor] = []
    for part in (m for m in network.modules() if isinstance(m, FSDPModule)):
        if stays:
            part.set_reshard_after_backward(False, recurse=False)
        part.unshard()  # module by module: never whole at once
        leaves += [p for p in part.parameters(recurse=False) if p.requires_grad]
        part.reshard()
    return leaves
