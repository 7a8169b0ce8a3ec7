"""Inner optimisers, built in one place for every recipe, site and strategy.

Updates are taken tensor by tensor (`foreach` and `fused` off), so that a list of bare tensors with
the same gradients moves to the same bits as a module's parameters: the coordinator mirrors a site's
optimiser that way where gradients, not deltas, are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.workloads.muon import Muon

__all__ = [
    "build_optimizer",
    "build_optimizers",
    "clip",
    "full_norm",
    "joint_norm",
    "step_optimizers",
]


def build_optimizer(config: InnerConfig, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The inner optimiser of one network."""
    params = list(params)
    if config.name == "sgd":
        return torch.optim.SGD(
            params,
            lr=config.lr,
            momentum=config.beta1,
            weight_decay=config.weight_decay,
            foreach=False,
            fused=False,
        )
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return Muon(params, config.lr, betas, config.weight_decay)
    assert config.name in ("adam", "adamw")
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    optimizer: torch.optim.Optimizer = kind(
        params,
        lr=config.lr,
        betas=betas,
        weight_decay=config.weight_decay,
        foreach=False,
        fused=False,
    )
    return optimizer


def build_optimizers(
    inner: Mapping[str, InnerConfig], networks: Mapping[str, nn.Module]
) -> dict[str, torch.optim.Optimizer]:
    """The inner optimiser of each network, by the network's name."""
    return {
        name: build_optimizer(inner[name], network.parameters())
        for name, network in networks.items()
    }


def step_optimizers(
    inner: Mapping[str, InnerConfig],
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> None:
    """Clip the gradients of these networks as configured, and step them; to follow `reduce`."""
    for name, network in networks.items():
        clip(network.parameters(), inner[name].clip_norm)
        optimizers[name].step()


def clip(params: Iterable[Tensor], max_norm: float) -> None:
    """Scale gradients in place so that their joint norm is at most `max_norm`; 0 leaves them.

    To be called once gradients are complete, after `reduce`: all sites then clip the same mean.
    The order of the parameters does not matter, not even to the last bit.
    """
    params = list(params)
    if max_norm > 0:
        norms = [full_norm(p.grad) for p in params if p.grad is not None]
        scale_gradients(params, max_norm, joint_norm(norms))


def full_norm(gradient: Tensor) -> Tensor:
    """The norm of one tensor, (), in fp32 at least."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    # Of pieces at several processes, the norm of all of them.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def joint_norm(norms: Sequence[Tensor]) -> Tensor | None:
    """The norm, (), of tensors that have these norms; None if there are none."""
    if not norms:
        return None
    # Sorted, since a mirror lists parameters in name order and a module in its own.
    ordered = torch.stack([norm.to(norms[0].device) for norm in norms]).sort().values
    total: Tensor = torch.linalg.vector_norm(ordered)
    return total


def scale_gradients(params: Iterable[Tensor], max_norm: float, norm: Tensor | None) -> None:
    """Scale gradients of a joint norm in place so that it is at most `max_norm`."""
    params = [param for param in params if param.grad is not None]
    if norm is not None and params:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach=False)
