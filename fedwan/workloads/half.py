"""Networks whose weights are in bf16, and so their gradients and first moments.

A value of a network takes 10 bytes under Adam, in place of 16: the squares of gradients stay in
fp32 (`fedwan.workloads.moments.keep_squares_in_full`). What is computed is computed as under
autocast: matrix products in bf16, norms and losses in fp32. A change of a weight by less than 1/512
of it is lost, as always with weights in bf16; the coordinator keeps its own in fp32, so that what
the sites agree on adds up there.

Batch and instance norm keep their weights and statistics in fp32: they are few, near 1 bf16 is
coarse, and variances are merged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["hold_in_half"]


def hold_in_half(network: nn.Module) -> None:
    """Have weights and buffers in bf16, and every forward pass under autocast, its result in fp32.

    Args:
        network: changed in place, its class included; before an optimiser has its parameters.
    """
    for module in network.modules():
        if isinstance(module, _NormBase):
            continue
        for param in module.parameters(recurse=False):
            param.data = param.data.bfloat16()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.bfloat16()
    # The class, not the instance: copies of the network compute with their own weights.
    network.__class__ = _in_half(type(network))


def _in_half(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **more: Any) -> Any:
        device = next(self.parameters()).device.type
        with torch.autocast(device, torch.bfloat16):
            out = kind.forward(self, *args, **more)
        return out.float() if isinstance(out, Tensor) else out

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
