"""Inner optimisers and their rates over a run, in one place for every recipe, site and strategy.

Updates are taken tensor by tensor (`foreach` and `fused` off), so that a list of bare tensors with
the same gradients moves to the same bits as a module's parameters: the coordinator mirrors a site's
optimiser that way where gradients, not deltas, are merged. A rate is a function of the run's step
alone, not of how many steps an optimiser has taken: a site that was away goes on with the rate that
the others have, and a coordinator that steps gradients itself has the sites' rates to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig

__all__ = [
    "SCHEDULES",
    "Muon",
    "build_optimizer",
    "build_optimizers",
    "clip",
    "full_norm",
    "is_matrix",
    "rate_at",
    "set_rates",
    "step_optimizers",
]

SCHEDULES = ("constant", "linear", "cosine")


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices and AdamW for everything else, with one group and one state.

    Both follow one learning rate and one decay: a matrix's step is scaled to the size that AdamW's
    has (Liu et al. 2025, 2502.16982), so that a rate found for AdamW is one to begin with. Products
    of matrices are in bf16, which a processor without instructions for it does far slower.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; without closure."""
        assert closure is None
        (group,) = self.param_groups
        same = {name: group[name] for name in ("lr", "weight_decay")}
        parts: list[torch.optim.Optimizer] = []
        if matrices := [param for param in group["params"] if is_matrix(param.ndim)]:
            like_adamw = {"momentum": group["betas"][0], "adjust_lr_fn": "match_rms_adamw"}
            parts.append(torch.optim.Muon(matrices, **same, **like_adamw))
        if others := [param for param in group["params"] if not is_matrix(param.ndim)]:
            adamw = {"betas": group["betas"], "foreach": False, "fused": False}
            parts.append(torch.optim.AdamW(others, **same, **adamw))
        for part in parts:
            part.state = self.state
            part.step()


def is_matrix(ndim: int) -> bool:
    """Whether a parameter of so many dimensions is stepped by Muon.

    Embeddings, one row for each class, are matrices, too: nothing but its shape tells a parameter
    apart at the coordinator.
    """
    return ndim == 2


def build_optimizer(config: InnerConfig, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The inner optimiser of one network: `adam`, `adamw`, `muon` or `sgd`.

    Args:
        config: resolved settings.
        params: the network's parameters, or a mirror of them in the same order.
    """
    params = list(params)
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return Muon(params, config.lr, betas, config.weight_decay)
    one_by_one: dict[str, Any] = {"foreach": False, "fused": False}
    usual: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **one_by_one}
    if config.name == "sgd":
        return torch.optim.SGD(params, momentum=config.beta1, **usual)
    assert config.name in ("adam", "adamw")
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(params, betas=betas, **usual)


def build_optimizers(
    inner: Mapping[str, InnerConfig], networks: Mapping[str, nn.Module]
) -> dict[str, torch.optim.Optimizer]:
    """The inner optimiser of each network, by the network's name."""
    return {name: build_optimizer(inner[name], net.parameters()) for name, net in networks.items()}


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
    params = [param for param in params if param.grad is not None]
    if max_norm <= 0 or not params:
        return
    norms = [full_norm(param.grad) for param in params if param.grad is not None]
    # Sorted, since a mirror lists parameters in name order and a module in its own.
    ordered = torch.stack([norm.to(norms[0].device) for norm in norms]).sort().values
    total = torch.linalg.vector_norm(ordered)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach=False)


def full_norm(gradient: Tensor) -> Tensor:
    """The norm of one tensor, (), in fp32 at least; of pieces at several processes, of them all."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def rate_at(config: InnerConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step of the run, counted from 0; beyond the end, the last step's.

    >>> warm = InnerConfig(lr=1.0, warmup_steps=4, schedule="linear")
    >>> [rate_at(warm, step, 8) for step in (0, 1, 3, 4, 6, 7, 9)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.25, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    rest = max(1, num_steps - config.warmup_steps)
    share = min(step - config.warmup_steps, rest - 1) / rest
    if config.schedule == "linear":
        return config.lr * (1.0 - share)
    assert config.schedule == "cosine"
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * share))


def set_rates(
    optimizers: Mapping[str, torch.optim.Optimizer],
    inner: Mapping[str, InnerConfig],
    step: int,
    num_steps: int,
) -> None:
    """Set the rates of one step, counted from 0; those that never change are left alone."""
    for network, config in inner.items():
        if config.warmup_steps or config.schedule != "constant":
            for group in optimizers[network].param_groups:
                group["lr"] = rate_at(config, step, num_steps)
