"""Inner optimisers, their rates over a run, and their moments as tensors of the model."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.optim_state import NamedOptimizers
from fedwan.state import is_moment, layout_of
from fedwan.workloads.optim import (
    begin_moments,
    build_optimizer,
    clip,
    model_name,
    moment_layout,
    rate_at,
    set_rates,
)
from tests.support import TinyNetwork

KINDS = [
    InnerConfig("adam", lr=0.1, beta1=0.5, weight_decay=0.01, state="average"),
    InnerConfig("adamw", lr=0.1, weight_decay=0.1, state="average"),
    InnerConfig("sgd", lr=0.1, beta1=0.9, state="average"),
]
every_kind = pytest.mark.parametrize("config", KINDS, ids=lambda config: config.name)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 17), nn.Linear(17, 3))


@every_kind
def test_a_mirror_of_bare_tensors_moves_to_the_same_bits_and_so_does_a_restored_one(
    config: InnerConfig,
) -> None:
    params: list[Tensor] = list(network().parameters())
    mirror = [param.detach().clone() for param in params]
    optimizers = [build_optimizer(config, params), build_optimizer(config, reversed(mirror))]
    (group,) = optimizers[0].param_groups
    momentum = group["momentum"] if config.name == "sgd" else group["betas"][0]
    found = (type(optimizers[0]).__name__.lower(), group["lr"], group["weight_decay"], momentum)
    assert found == (config.name, config.lr, config.weight_decay, config.beta1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        for param, twin in zip(params, mirror, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            twin.grad = param.grad.clone()
        for tensors, optimizer in zip((params, mirror[::-1]), optimizers, strict=True):
            clip(tensors, 0.1)
            optimizer.step()
        assert all(torch.equal(p.grad, m.grad) for p, m in zip(params, mirror, strict=True))
        state = copy.deepcopy(optimizers[1].state_dict())
        optimizers[1] = build_optimizer(config, reversed(mirror))
        optimizers[1].load_state_dict(state)
    assert all(torch.equal(p, m) for p, m in zip(params, mirror, strict=True))


# Rates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_are_torch_s_own(schedule: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler: Any = {
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    }[schedule]()
    theirs = []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    config = InnerConfig(lr=0.4, schedule=schedule)
    assert [rate_at(config, step, 10) for step in range(10)] == pytest.approx(theirs)


def test_a_warm_up_ends_at_the_full_rate_and_other_networks_are_left_alone() -> None:
    config = InnerConfig(lr=2.0, schedule="cosine:4")
    assert [rate_at(config, step, 20) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    last = rate_at(config, 19, 20)
    assert 0 < last < 0.05 and rate_at(config, 50, 20) == last
    assert rate_at(config, 12, 20) == pytest.approx(1 + math.cos(math.pi / 2))
    optimizers = {n: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0) for n in "ab"}
    set_rates(optimizers, {"a": InnerConfig(lr=1.0, schedule="linear")}, 5, 10)
    assert [optimizers[n].param_groups[0]["lr"] for n in "ab"] == [0.5, 9.0]


# Moments -----------------------------------------------------------------------------------------


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
        module(x).square().mean().backward()
        optimizer.step()


@every_kind
def test_moments_of_zero_steps_lead_to_the_same_bits_and_are_tensors_of_the_layout(
    config: InnerConfig,
) -> None:
    one = TinyNetwork(norm=False)
    other = copy.deepcopy(one)
    stepped(one, build_optimizer(config, one.parameters()))
    optimizer = build_optimizer(config, other.parameters())
    named = NamedOptimizers.of({"net": other}, {"net": optimizer})

    def moments() -> dict[str, Tensor]:
        begin_moments(config, optimizer, other.parameters())
        return {model_name(name): value for name, value in named.state().items()}

    begun = moments()
    layout = layout_of({"net": other, "more": TinyNetwork(norm=False)})
    specs = moment_layout(layout, {"net": config, "more": InnerConfig()})
    assert sorted(begun) == list(specs)
    for name, spec in specs.items():
        assert is_moment(name) and not begun[name].any()
        assert (begun[name].shape, begun[name].dtype) == (spec.shape, spec.dtype)
    stepped(other, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert all(value.data_ptr() == begun[name].data_ptr() for name, value in moments().items())
