"""Moments as tensors of the model."""

from __future__ import annotations

import copy

import pytest
import torch

from fedwan.config import InnerConfig
from fedwan.optim_state import optimizer_state, parameter_names
from fedwan.state import Role, State, layout_of, state_of
from fedwan.workloads.moments import (
    begin_moments,
    is_moment,
    model_name,
    moment_layout,
)
from fedwan.workloads.optim import build_optimizer
from tests.support import TinyNetwork

ADAM = InnerConfig(lr=1e-2, state="average")
KINDS = [
    ADAM,
    InnerConfig("adamw", lr=1e-2, weight_decay=0.1, state="average"),
    InnerConfig("muon", lr=1e-2, beta1=0.9, state="average"),
    InnerConfig("sgd", lr=1e-2, beta1=0.9, state="average"),
]


def stepped(network: torch.nn.Module, optimizer: torch.optim.Optimizer, num: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        optimizer.zero_grad()
        network(torch.randn(4, 2, generator=generator)).square().mean().backward()
        optimizer.step()


def begun(config: InnerConfig, optimizer: torch.optim.Optimizer, tensors: State) -> State:
    """An optimiser's moments by their names in the model, those of zero steps if it has none."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    begin_moments(config, optimizer, params)
    flat = optimizer_state(optimizer, parameter_names(optimizer, tensors))
    return {model_name(f"net:{name}"): value for name, value in flat.items()}


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.name)
def test_moments_of_zero_steps_lead_to_the_same_bits_and_stay_where_they_are(
    config: InnerConfig,
) -> None:
    plain = TinyNetwork(norm=False)
    shared = copy.deepcopy(plain)
    tensors = state_of({"net": shared})
    stepped(plain, build_optimizer(config, plain.parameters()), 3)
    optimizer = build_optimizer(config, shared.parameters())
    moments = begun(config, optimizer, tensors)
    assert not any(bool(value.any()) for value in moments.values())
    stepped(shared, optimizer, 3)
    for one, other in zip(plain.parameters(), shared.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(bool(value.any()) for value in moments.values())
    again = begun(config, optimizer, tensors)
    assert {n: v.data_ptr() for n, v in again.items()} == {
        n: v.data_ptr() for n, v in moments.items()
    }


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.name)
def test_their_layout_is_that_of_the_tensors(config: InnerConfig) -> None:
    networks = {"net": TinyNetwork(norm=True), "other": TinyNetwork(norm=False)}
    layout = layout_of(networks)
    inner = {"net": config, "other": InnerConfig()}
    moments = moment_layout(layout, inner)
    optimizer = build_optimizer(config, networks["net"].parameters())
    shared = begun(config, optimizer, state_of(networks))
    assert sorted(shared) == list(moments)
    for name, spec in moments.items():
        assert is_moment(name) and name.startswith("net/")
        assert (shared[name].shape, shared[name].dtype) == (spec.shape, spec.dtype)
    assert not any(is_moment(name) for name in layout)


def test_roles_keep_averaged_squares_above_zero_and_count_steps_once() -> None:
    moments = moment_layout(layout_of({"net": TinyNetwork(norm=False)}), {"net": ADAM})
    roles = {name.partition("|")[2]: spec.role for name, spec in moments.items()}
    assert roles == {"exp_avg": Role.MEAN, "exp_avg_sq": Role.VARIANCE, "step": Role.COUNTER}
