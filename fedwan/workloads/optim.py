"""Inner optimisers: what steps a network, at which rate, and which of its moments travel.

On a CPU updates are taken tensor by tensor (`foreach` and `fused` off), so that a list of bare
tensors with the same gradients moves to the same bits as a module's parameters: the coordinator
mirrors a site's optimiser that way where gradients, not deltas, are merged. A rate is a function of
the run's step alone, not of how many steps an optimiser has taken: a site that was away goes on
with the rate that the others have, and a coordinator that steps gradients itself has the sites'
rates to the last bit.

What a site has learned about its gradients is its own (`inner.NETWORK.state=keep`), or is forgotten
with every update (`reset`), or is merged like running statistics (`average`). Then each moment is a
tensor `network/parameter|field` that travels with its parameter, uncoded, and is merged by its
role. Where sites go on stepping while an update flies, moments land as they departed.

An average of the weights over every step (`inner.NETWORK.state=ema`), `network/parameter|ema`, is
no moment of the optimiser: it travels and is coded as the weights are, and steps by the mean delta.
An average over merged weights alone lacks what steps between two rounds average out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.state import Layout, Role, TensorSpec, ema_name, network_of
from fedwan.workloads.precision import full_dtype

_HOW = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
"""Of an optimiser's settings, those that do not say what a step comes to."""
_MOMENTS = ("betas", "momentum", "amsgrad")
"""Those that say which moments it keeps."""


def build_optimizer(config: InnerConfig, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The inner optimiser of one network's parameters, or of a mirror of them in the same order."""
    params, betas = list(params), (config.beta1, config.beta2)
    usual: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    # Fused on a GPU, where no mirror on a CPU would come to the same bits in any case.
    usual |= {"foreach": False, "fused": bool(params) and all(p.is_cuda for p in params)}
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


def clip(params: Iterable[Tensor], max_norm: float) -> None:
    """Scale complete gradients in place to a joint norm of at most `max_norm`; 0 leaves them.

    The order of the parameters does not matter, not even to the last bit.
    """
    if max_norm <= 0:
        return
    params = [param for param in params if param.grad is not None]
    norms = [full_norm(param.grad) for param in params if param.grad is not None]
    if not norms:
        return
    # Sorted, since a mirror lists parameters in name order and a module in its own.
    ordered = torch.stack([norm.to(norms[0].device) for norm in norms]).sort().values
    total = torch.linalg.vector_norm(ordered)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach=False)


def full_norm(gradient: Tensor) -> Tensor:
    """The norm of one tensor, (), in fp32 at least.

    Of pieces at several processes it is of the whole, gathered: the coordinator's, to the bit.
    """
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    norm: Tensor = torch.linalg.vector_norm(whole, dtype=full_dtype(whole.dtype))
    return norm


def rate_at(config: InnerConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step of the run, counted from 0; beyond the end, the last step's.

    >>> warm = InnerConfig(lr=1.0, schedule="linear:4")
    >>> [rate_at(warm, step, 8) for step in (0, 1, 3, 4, 6, 7, 9)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.25, 0.25]
    """
    kind, _, count = config.schedule.partition(":")
    warmup = int(count or 0)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if kind == "constant":
        return config.lr
    rest = max(1, num_steps - warmup)
    share = min(step - warmup, rest - 1) / rest
    if kind == "linear":
        return config.lr * (1.0 - share)
    assert kind == "cosine"
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * share))


def set_rates(
    optimizers: Mapping[str, torch.optim.Optimizer],
    inner: Mapping[str, InnerConfig],
    step: int,
    num_steps: int,
) -> None:
    """Set the rates of one step, counted from 0; those that never change are left alone."""
    for network, config in inner.items():
        if config.schedule != "constant":
            for group in optimizers[network].param_groups:
                group["lr"] = rate_at(config, step, num_steps)


def averaged(inner: Mapping[str, InnerConfig]) -> dict[str, InnerConfig]:
    """The networks whose moments travel."""
    return {network: config for network, config in inner.items() if config.state == "average"}


def moment_layout(layout: Layout, inner: Mapping[str, InnerConfig]) -> Layout:
    """Specs of the moments that travel, in name order; `layout` is of the networks without them."""
    moments: Layout = {}
    for name, spec in layout.items():
        config = inner.get(network_of(name), InnerConfig())
        if spec.role is not Role.PARAMETER:
            continue
        if config.state == "ema":
            moments[ema_name(name)] = TensorSpec(spec.shape, full_dtype(spec.dtype), spec.role)
        for field, role in _moments(config).items() if config.state == "average" else ():
            # With beta1 = 0 the first moment is the last gradient, which is not worth sending.
            if config.beta1 > 0 or field not in ("exp_avg", "momentum_buffer"):
                shape = () if field == "step" else spec.shape
                moments[f"{name}|{field}"] = TensorSpec(shape, _dtype(field, spec.dtype), role)
    return dict(sorted(moments.items()))


def begin_moments(
    config: InnerConfig, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]
) -> None:
    """Give parameters that have not stepped yet the moments of zero steps: no bit changes."""
    beside = counted_beside(optimizer)
    for param in params:
        if not optimizer.state[param]:
            state = {field: _zero(field, param) for field in _moments(config)}
            if "step" in state and param in beside:
                state["step"] = state["step"].to(param.device)
            optimizer.state[param] = state


def counted_beside(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Parameters whose steps torch counts on their own device, and not on the CPU."""
    groups = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    return {param for group in groups for param in group["params"]}


def model_name(name: str) -> str:
    """A moment's name among the model's tensors, from that among its optimiser's.

    >>> model_name("net:exp_avg|net/weight")
    'net/weight|exp_avg'
    """
    head, _, parameter = name.partition("|")
    return f"{parameter}|{head.rpartition(':')[2]}"


def _moments(config: InnerConfig) -> dict[str, Role]:
    """Of a parameter, with the role of each."""
    if config.name == "sgd":
        return {"momentum_buffer": Role.MEAN}
    return {"exp_avg": Role.MEAN, "exp_avg_sq": Role.VARIANCE, "step": Role.COUNTER}


def _dtype(field: str, dtype: torch.dtype) -> torch.dtype:
    if field == "step":
        return torch.float32
    return full_dtype(dtype) if field == "exp_avg_sq" else dtype


def _zero(field: str, param: Tensor) -> Tensor:
    dtype = _dtype(field, param.dtype)
    if field == "step":
        return torch.zeros((), dtype=dtype)
    return torch.zeros_like(param, dtype=dtype).detach()


def difference(
    config: InnerConfig, optimizer: torch.optim.Optimizer, *, is_stepped: bool = True
) -> str:
    """What sets an optimiser apart from the one that the settings describe; empty if nothing.

    Unless somebody else steps by the settings, which moments there are, and what they mean.
    """
    if config.name == "own":
        return f"it is {type(optimizer).__name__}, which no setting tells"
    described = build_optimizer(config, [torch.zeros(1, requires_grad=True)])
    if type(optimizer).__name__ != type(described).__name__:
        return f"it is {type(optimizer).__name__}, the settings say {config.name!r}"
    for name, value in described.defaults.items():
        if name in _HOW or not (is_stepped or name in _MOMENTS):
            continue
        for group in optimizer.param_groups:
            given = group.get(name)
            if given != value if is_stepped else _meaning(given) != _meaning(value):
                return f"its {name} is {given}, the settings say {value}"
    return ""


def rounds_otherwise(optimizer: torch.optim.Optimizer) -> str:
    """Why its steps on a CPU come to other last bits than this module's; empty if they do not."""
    for group in optimizer.param_groups:
        if any(param.is_cpu for param in group["params"]):
            if group.get("fused"):
                return "it is fused, which comes to other last bits"
            if isinstance(group.get("lr"), Tensor):
                return "its lr is a tensor, which comes to other last bits"
    return ""


def _meaning(setting: Any) -> tuple[Any, ...]:
    """Of betas or a momentum: whether there is a first moment, and what the second one is of."""
    first, *rest = setting if isinstance(setting, tuple) else (setting,)
    return first > 0, *rest
