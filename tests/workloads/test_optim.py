"""Inner optimisers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.workloads.optim import build_optimizer, build_optimizers, clip, step_optimizers

CONFIGS = [
    InnerConfig("adam", lr=0.1, beta1=0.5, weight_decay=0.01),
    InnerConfig("adamw", lr=0.1, weight_decay=0.1),
    InnerConfig("muon", lr=0.1, beta1=0.9, weight_decay=0.1),
    InnerConfig("sgd", lr=0.1, beta1=0.9),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 3))


def set_random_gradients(params: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_mirror_of_bare_tensors_moves_to_the_same_bits(config: InnerConfig) -> None:
    params: list[Tensor] = list(network().parameters())
    mirror = [param.detach().clone() for param in params]
    optimizers = build_optimizer(config, params), build_optimizer(config, reversed(mirror))
    for step in range(20):
        set_random_gradients(params, step)
        for param, twin in zip(params, mirror, strict=True):
            twin.grad = param.grad.clone() if param.grad is not None else None
        for tensors, optimizer in zip((params, mirror), optimizers, strict=True):
            clip(tensors, 1.0)
            optimizer.step()
    assert all(torch.equal(p, m) for p, m in zip(params, mirror, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_settings_reach_the_optimiser(config: InnerConfig) -> None:
    optimizer = build_optimizer(config, network().parameters())
    assert type(optimizer).__name__.lower() == config.name
    (group,) = optimizer.param_groups
    assert group["lr"] == config.lr
    assert group["weight_decay"] == config.weight_decay
    momentum = group["momentum"] if config.name == "sgd" else group["betas"][0]
    assert momentum == config.beta1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_restored_optimiser_goes_on_to_the_same_bits(config: InnerConfig) -> None:
    params = list(network().parameters())
    optimizer = build_optimizer(config, params)
    set_random_gradients(list(params), 0)
    optimizer.step()
    copies = [param.detach().clone() for param in params]
    restored = build_optimizer(config, copies)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for tensors, stepping in ((params, optimizer), (copies, restored)):
        set_random_gradients(list(tensors), 1)
        stepping.step()
    assert all(torch.equal(p, c) for p, c in zip(params, copies, strict=True))


def test_long_gradients_are_shortened_to_the_norm_and_short_ones_kept() -> None:
    params: list[Tensor] = list(network().parameters())
    set_random_gradients(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    for max_norm in (0.0, 1e6):
        clip(params, max_norm)
        assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
    clip(params, 0.5)
    total = torch.cat([p.grad.flatten() for p in params if p.grad is not None]).norm()
    assert float(total) == pytest.approx(0.5, rel=1e-4)


def test_each_network_is_clipped_by_its_own_setting() -> None:
    networks = {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}
    inner = {name: InnerConfig("sgd", lr=1.0, beta1=0.0) for name in networks}
    inner["b"].clip_norm = 0.1
    before = {name: n.weight.detach().clone() for name, n in networks.items()}
    for module in networks.values():
        module.weight.grad, module.bias.grad = torch.ones(1, 2), torch.zeros(1)
    step_optimizers(inner, networks, build_optimizers(inner, networks))
    moved = {name: float((n.weight.detach() - before[name]).norm()) for name, n in networks.items()}
    assert moved["a"] == pytest.approx(2**0.5)
    assert moved["b"] == pytest.approx(0.1, rel=1e-4)
