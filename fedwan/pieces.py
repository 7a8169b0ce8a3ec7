"""Tensors that lie in pieces at a site's processes, as FSDP2 and tensor parallelism cut them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def is_cut(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`, which takes half a second to import where there is none."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process's piece of a tensor, sharing memory; all of it if it is no `DTensor`."""
    piece: Tensor = tensor.to_local() if is_cut(tensor) else tensor  # type: ignore[attr-defined]
    return piece


def is_plain(tensor: Tensor) -> bool:
    """Whether its values lie in memory of its own: not sparse, nor made of other tensors."""
    piece = local(tensor)
    return piece.layout == torch.strided and not hasattr(piece, "__tensor_flatten__")


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the pieces of all processes; the tensor itself if it is no `DTensor`.

    Collective for a `DTensor`.
    """
    full: Tensor = tensor.full_tensor() if is_cut(tensor) else tensor  # type: ignore[attr-defined]
    return full


def piece_like(value: Tensor, tensor: Tensor) -> Tensor:
    """This process's piece of a whole value, cut as a tensor is; no communication."""
    if not is_cut(tensor):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    value = value.to(tensor.device)
    cut = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return cut.to_local()


def reshard(networks: Iterable[nn.Module]) -> None:
    """Drop what FSDP2 has gathered: it is of weights that others took the place of."""
    from torch.distributed.fsdp import FSDPModule

    for module in (m for network in networks for m in network.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
