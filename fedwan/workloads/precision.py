"""What a step computes in, and blocks that are computed twice.

Under `16-mixed` losses are multiplied by a scale and gradients divided by it (Micikevicius et al.
2018, 1710.03740, section 3.2), by torch's GradScaler. A step that overflowed is repeated, where a
script would skip it: sites would otherwise be steps apart.

Under `site.recompute` the backward pass computes each block again from its input, which alone is
kept (activation checkpointing, Chen et al. 2016, 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedwan.errors import ConfigError

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What `site.precision` has matrix products computed in."""


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


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
