"""Inner optimisers, and their rates over a run."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedwan.codecs import plain
from fedwan.config import Config, InnerConfig
from fedwan.recipes import resolve_strategy
from fedwan.state import Role, TensorSpec
from fedwan.workloads.optim import (
    Muon,
    build_optimizer,
    build_optimizers,
    clip,
    rate_at,
    set_rates,
    step_optimizers,
)
from strategies import parameter_server

CONFIGS = [
    InnerConfig("adam", lr=0.1, beta1=0.5, weight_decay=0.01),
    InnerConfig("adamw", lr=0.1, weight_decay=0.1),
    InnerConfig("muon", lr=0.1, beta1=0.9, weight_decay=0.1),
    InnerConfig("sgd", lr=0.1, beta1=0.9),
]
LR, BETAS, DECAY = 0.02, (0.8, 0.99), 0.1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 17), nn.Linear(17, 3))


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
def test_settings_reach_the_optimiser_and_a_restored_one_goes_on_to_the_same_bits(
    config: InnerConfig,
) -> None:
    params = list(network().parameters())
    optimizer = build_optimizer(config, params)
    (group,) = optimizer.param_groups
    momentum = group["momentum"] if config.name == "sgd" else group["betas"][0]
    found = (type(optimizer).__name__.lower(), group["lr"], group["weight_decay"], momentum)
    assert found == (config.name, config.lr, config.weight_decay, config.beta1)
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


# Muon --------------------------------------------------------------------------------------------


def test_matrices_step_as_torchs_muon_and_the_rest_as_its_adamw_with_settings_of_the_moment() -> (
    None
):
    ours, theirs = network(), network()
    params: list[Tensor] = list(theirs.parameters())
    same: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
    matrices = [param for param in params if param.ndim == 2]
    rest = [param for param in params if param.ndim != 2]
    peers = (
        torch.optim.Muon(matrices, momentum=BETAS[0], adjust_lr_fn="match_rms_adamw", **same),
        torch.optim.AdamW(rest, betas=BETAS, **same),
    )
    optimizer = Muon(ours.parameters(), LR, BETAS, DECAY)
    for step, lr in enumerate((LR, LR, 0.5 * LR)):
        for each in (optimizer, *peers):
            each.param_groups[0]["lr"] = lr
        for tensors in (list(ours.parameters()), params):
            set_random_gradients(list(tensors), step)
        for each in (optimizer, *peers):
            each.step()
    for one, other, first in zip(
        ours.parameters(), theirs.parameters(), network().parameters(), strict=True
    ):
        assert torch.equal(one, other) and not torch.equal(one, first)
        fields = {"momentum_buffer"} if one.ndim == 2 else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[one]) == fields


# Rates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_are_torch_s_own(schedule: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    if schedule == "linear":
        scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
    elif schedule == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    else:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    theirs = []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    config = InnerConfig(lr=0.4, schedule=schedule)
    assert [rate_at(config, step, 10) for step in range(10)] == pytest.approx(theirs)


def test_a_warm_up_ends_at_the_full_rate_and_the_end_is_not_passed() -> None:
    config = InnerConfig(lr=2.0, warmup_steps=4, schedule="cosine")
    assert [rate_at(config, step, 20) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    last = rate_at(config, 19, 20)
    assert 0 < last < 0.05 and rate_at(config, 50, 20) == last
    assert rate_at(config, 12, 20) == pytest.approx(1 + math.cos(math.pi / 2))


def test_rates_of_other_networks_are_left_alone() -> None:
    optimizers = {n: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0) for n in "ab"}
    set_rates(optimizers, {"a": InnerConfig(lr=1.0, schedule="linear")}, 5, 10)
    assert [optimizers[n].param_groups[0]["lr"] for n in "ab"] == [0.5, 9.0]


def test_the_parameter_server_steps_with_the_run_s_rate() -> None:
    """With SGD and a constant gradient the weights move by the sum of the rates."""
    inner = {"g": InnerConfig("sgd", lr=1.0, beta1=0.0, schedule="linear")}
    config = Config(strategy="parameter_server", sites=1, h=1, steps=10, inner=inner)
    resolve_strategy(parameter_server, config, {"g": "regression"})
    model = {"g/w": torch.zeros(1)}
    layout = {"g/w": TensorSpec((1,), torch.float32, Role.PARAMETER)}
    step = parameter_server.build(config).server_step(model, layout)
    for run_step in range(10):
        step.begin(run_step)
        step.commit(plain(step.propose({"g/w": torch.ones(1)})))
    assert model["g/w"].item() == pytest.approx(-sum(1 - step / 10 for step in range(10)))
