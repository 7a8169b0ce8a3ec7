"""Activation checkpointing (Chen et al. 2016, 1604.06174), block by block.

Of each block, its input alone is kept; the backward pass computes the rest again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedwan.errors import ConfigError

__all__ = ["recompute_blocks"]


def recompute_blocks(networks: Iterable[nn.Module]) -> None:
    """Have networks' blocks compute again in the backward pass; their tensors keep their names.

    A block is a module of several in an `nn.ModuleList` or `nn.Sequential`. It may draw from
    torch's own random generators, but from no others.
    """
    blocks = [block for network in networks for block in _blocks(network)]
    if not blocks:
        raise ConfigError(
            "site.recompute = True has no effect: no network has blocks of several modules; "
            "leave it out"
        )
    for block in blocks:
        _wrap(block)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_list and any(True for _ in child.children()):
            yield child
        else:
            yield from _blocks(child)


def _wrap(block: nn.Module) -> None:
    forward = block.forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Still(block)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = recomputed


class _Still(AbstractContextManager[None]):
    """Running statistics, which the forward pass has moved, do not move again.

    A second derivative enters it anew.
    """

    def __init__(self, block: nn.Module) -> None:
        self._buffers = list(block.buffers())
        self._kept: list[Tensor] = []

    def __enter__(self) -> None:
        self._kept = [buffer.clone() for buffer in self._buffers]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(value)
