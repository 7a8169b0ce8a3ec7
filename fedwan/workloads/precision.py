"""What a step computes in and keeps: half precision, a scale for losses, blocks computed twice.

Under `site.precision=bf16-true` weights are in bf16, and so their gradients and first moments. A
value of a network takes 10 bytes under Adam, in place of 16: the squares of gradients stay in fp32.
What is computed is computed as under autocast. A change of a weight by less than 1/512 of it is
lost; the coordinator keeps its own in fp32, so that what the sites agree on adds up there. Batch
and instance norm stay in fp32: they are few, near 1 bf16 is coarse, and variances are merged.

Under `16-mixed` losses are multiplied by a scale and gradients divided by it (Micikevicius et al.
2018, 1710.03740, section 3.2): half as large after a gradient that is not finite, twice as large
after many that are. Unlike torch's GradScaler it repeats a step that overflowed instead of skipping
it: sites would otherwise be steps apart.

Under `site.recompute` the backward pass computes each block again from its input, which alone is
kept (activation checkpointing, Chen et al. 2016, 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fedwan.errors import ConfigError, FedwanError

HALF = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-mixed": torch.float16}
"""What `site.precision` has matrix products computed in."""
_FIRST = 2.0**16
_LEAST = 2.0**-10
_GROWS_AFTER = 2000


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def hold_in_half(network: nn.Module) -> None:
    """Have weights and buffers in bf16, and every forward pass under autocast, its result in fp32.

    Changes the network in place, its class included; before an optimiser has its parameters.
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
        with torch.autocast(next(self.parameters()).device.type, torch.bfloat16):
            out = kind.forward(self, *args, **more)
        return out.float() if isinstance(out, Tensor) else out

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def keep_squares_in_full(optimizer: torch.optim.Optimizer) -> None:
    """Have Adam keep the squares of gradients in fp32, from its second step on.

    In bf16 they could only grow: what beta2 = 0.999 takes from one is less than a 512th of it.
    """

    def widen(*_: object) -> None:
        for state in optimizer.state.values():
            if (squares := state.get("exp_avg_sq")) is not None:
                state["exp_avg_sq"] = squares.to(full_dtype(squares.dtype))

    optimizer.register_step_post_hook(widen)


class LossScale:
    """Scales losses, and judges the gradients that come of them.

    `state` has `scale` (float32, ()) and `streak` (int64, ()), how many updates in a row were good;
    on the CPU. Who puts a checkpoint back writes into them.
    """

    def __init__(self) -> None:
        self.state = {"scale": torch.tensor(_FIRST), "streak": torch.tensor(0)}

    @property
    def factor(self) -> float:
        """That losses are to be multiplied by."""
        return float(self.state["scale"])

    def unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Divide complete gradients, in place; False if one is not finite. Waits for a GPU."""
        for gradient in gradients:
            gradient.div_(self.factor)
        # The largest magnitude of each; NaN stays NaN.
        peaks = [torch.linalg.vector_norm(g, float("inf")) for g in gradients if g.numel()]
        return not peaks or bool(torch.stack(peaks).isfinite().all())

    def update(self, is_finite: bool) -> None:
        """Adapt the scale once the gradients of all networks that step together were unscaled."""
        scale, streak = self.state["scale"], self.state["streak"]
        if is_finite:
            streak.add_(1)
            if int(streak) == _GROWS_AFTER:
                streak.zero_()
                scale.mul_(2)
            return
        streak.zero_()
        scale.div_(2)
        if self.factor < _LEAST:
            raise FedwanError(
                "gradients in fp16 are not finite at any loss scale; set site.precision=bf16-mixed "
                "or lower the learning rates (inner.NETWORK.lr, outer.NETWORK.lr)"
            )


def recompute_blocks(networks: Iterable[nn.Module]) -> None:
    """Have networks' blocks compute again in the backward pass; their tensors keep their names.

    A block is a module of several in a list or sequence; it may draw from torch's generators alone.
    """
    blocks = [block for network in networks for block in _blocks(network)]
    if not blocks:
        raise ConfigError(
            "site.recompute = True has no effect: no network has blocks of several modules; "
            "leave it out"
        )
    for block in blocks:
        contexts = _Unmoved(block).contexts
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_list and any(True for _ in child.children()):
            yield child
        else:
            yield from _blocks(child)


class _Unmoved:
    """Around a second forward pass: running statistics, moved by the first, do not move again."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._kept: list[Tensor] = []

    def contexts(self) -> tuple[Any, Any]:
        """Of the first pass and of the second one."""
        return nullcontext(), self

    def __enter__(self) -> None:
        self._kept = [buffer.clone() for buffer in self._block.buffers()]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for buffer, value in zip(self._block.buffers(), self._kept, strict=True):
            buffer.copy_(value)
