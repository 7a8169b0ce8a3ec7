"""Networks that are whole only where they compute: ZeRO-3, by torch's `fully_shard`.

Each tensor is cut along its first dimension. A module's weights are whole only while it computes,
forward or backward (Rajbhandari et al. 2020, 1910.02054, section 5.3), on each process's part of
the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

__all__ = ["FullyShard"]


class FullyShard:
    """Implements `fedwan.site.pieces.Cut`.

    Args:
        device: of this process.
        size: number of processes.
        twice: networks that are differentiated twice. Such a one is whole from its first forward
            pass to the end of a step.
    """

    cuts_batch = True

    def __init__(self, device: torch.device, size: int, twice: Collection[str]) -> None:
        # No network of ours changes a layer's output in place, which is what it warns of.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        self._mesh = DeviceMesh(device.type, list(range(size)))
        self._twice = twice
        self._staying: list[nn.Module] = []

    def cut(self, name: str, network: nn.Module) -> list[Tensor]:
        """See `Cut`; gradients are of whole weights, which are there while they compute."""
        stays = name in self._twice
        if stays:
            self._staying.append(network)
        modules = [m for m in network.modules() if m is not network]
        for module in reversed(modules):
            if next(module.parameters(recurse=False), None) is not None:
                fully_shard(module, mesh=self._mesh, reshard_after_forward=not stays)
        fully_shard(network, mesh=self._mesh, reshard_after_forward=not stays)
        leaves: list[Tensor] = []
        for module in _cut_modules(network):
            if stays:
                module.set_reshard_after_backward(False, recurse=False)
            module.unshard()  # module by module: never whole at once
            leaves += [p for p in module.parameters(recurse=False) if p.requires_grad]
            module.reshard()
        return leaves

    def rest(self) -> None:
        """See `Cut`."""
        for network in self._staying:
            for module in _cut_modules(network):
                module.reshard()


def _cut_modules(network: nn.Module) -> list[Any]:
    """Those that have pieces of their own: modules, and `FSDPModule`."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]
