"""Inner optimisers' moments as tensors of the model, for networks whose sites share them.

What a site has learned about its gradients is its own (`inner.NETWORK.state=keep`), or is forgotten
with every update (`reset`), or is merged like running statistics (`average`). Then each moment is a
tensor `network/parameter|field` that travels with its parameter, uncoded, by its role:

    exp_avg, momentum_buffer    mean: averaged
    exp_avg_sq                  variance: averaged, never below zero
    step                        counter: the largest

Adam's moments weigh twice what the parameters do, or once with beta1 = 0, in fp32 whatever the
codec; Muon's of a matrix once, or nothing. Where sites go on stepping while an update flies,
moments land as they departed, like running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.state import Layout, Role, TensorSpec, network_of
from fedwan.workloads.optim import is_matrix
from fedwan.workloads.precision import square_dtype

__all__ = ["averaged", "begin_moments", "is_moment", "model_name", "moment_layout"]

_ADAM = {"exp_avg": Role.MEAN, "exp_avg_sq": Role.VARIANCE, "step": Role.COUNTER}
_MOMENTUM = {"momentum_buffer": Role.MEAN}


def averaged(inner: Mapping[str, InnerConfig]) -> dict[str, InnerConfig]:
    """The networks whose moments travel."""
    return {network: config for network, config in inner.items() if config.state == "average"}


def is_moment(name: str) -> bool:
    """Whether a tensor of a layout is a moment, and no part of the model.

    >>> is_moment("generator/main.0.weight|exp_avg"), is_moment("generator/main.0.weight")
    (True, False)
    """
    return "|" in name


def moment_layout(layout: Layout, inner: Mapping[str, InnerConfig]) -> Layout:
    """Specs of the moments that travel, in name order; `layout` is of the networks without them."""
    shared = averaged(inner)
    moments = {
        f"{name}|{field}": TensorSpec(
            () if field == "step" else spec.shape, _dtype(field, spec.dtype), role
        )
        for name, spec in layout.items()
        if spec.role is Role.PARAMETER
        if network_of(name) in shared
        for field, role in _travelling(shared[network_of(name)], len(spec.shape)).items()
    }
    return dict(sorted(moments.items()))


def begin_moments(
    config: InnerConfig, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]
) -> None:
    """Give parameters that have not stepped yet the moments of zero steps.

    With them an optimiser that was built from `config` steps to the same bits.
    """
    for param in params:
        if not optimizer.state[param]:
            optimizer.state[param] = {f: _zero(f, param) for f in _fields(config, param.ndim)}


def _fields(config: InnerConfig, ndim: int) -> dict[str, Role]:
    """Moments of a parameter of so many dimensions, and the role of each."""
    has_one = config.name == "sgd" or (config.name == "muon" and is_matrix(ndim))
    return _MOMENTUM if has_one else _ADAM


def _travelling(config: InnerConfig, ndim: int) -> dict[str, Role]:
    """Those that are worth sending: with beta1 = 0 the first one is the last gradient."""
    fields = _fields(config, ndim)
    first = ("exp_avg", "momentum_buffer")
    return {f: role for f, role in fields.items() if f not in first or config.beta1 > 0}


def model_name(name: str) -> str:
    """A moment's name among the model's tensors, from that among its optimiser's.

    >>> model_name("net:exp_avg|net/weight")
    'net/weight|exp_avg'
    """
    head, _, parameter = name.partition("|")
    return f"{parameter}|{head.rpartition(':')[2]}"


def _dtype(field: str, dtype: torch.dtype) -> torch.dtype:
    """Of a moment whose parameter has this dtype."""
    if field == "step":
        return torch.float32
    return square_dtype(dtype) if field == "exp_avg_sq" else dtype


def _zero(field: str, param: Tensor) -> Tensor:
    dtype = _dtype(field, param.dtype)
    if field == "step":
        return torch.zeros((), dtype=dtype)
    return torch.zeros_like(param, dtype=dtype).detach()
