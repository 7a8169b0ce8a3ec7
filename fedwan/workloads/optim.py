"""Inner optimisers, built in one place for every recipe, site and strategy.

Updates are taken tensor by tensor (`foreach` and `fused` off), so that a list of bare tensors with
the same gradients moves to the same bits as a module's parameters: the coordinator mirrors a site's
optimiser that way where gradients, not deltas, are merged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedwan.config import InnerConfig

__all__ = ["build_optimizer", "clip"]


def build_optimizer(config: InnerConfig, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The inner optimiser of one network.

    Args:
        config: resolved settings: `name` is `adam`, `adamw` or `sgd`.
        params: the network's parameters, or a mirror of them in the same order.

    Returns:
        An optimiser whose whole state is in its `state_dict()`.
    """
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
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[config.name](
        params,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        foreach=False,
        fused=False,
    )


def clip(params: Iterable[Tensor], max_norm: float) -> None:
    """Scale gradients in place so that their joint norm is at most `max_norm`; 0 leaves them.

    To be called once gradients are complete, after `reduce`: all sites then clip the same mean.
    """
    if max_norm > 0:
        torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=False)
