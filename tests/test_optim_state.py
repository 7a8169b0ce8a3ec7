"""An optimiser's state under its parameters' names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedwan.errors import CheckpointError
from fedwan.optim_state import load_optimizer, optimizer_state, parameter_names
from fedwan.state import read_tensors, state_of, write_tensors
from tests.support import same_bits

MAKERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
NAMES = ["g/0.weight", "g/0.bias", "g/1.weight", "g/1.bias"]

every_optimizer = pytest.mark.parametrize("name", MAKERS)


def make(name: str, backwards: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = list(network.parameters())
    return network, MAKERS[name](params[::-1] if backwards else params)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        network(torch.full((5, 3), float(step))).square().mean().backward()
        optimizer.step()


@every_optimizer
@pytest.mark.parametrize("backwards", [False, True], ids=["same_order", "other_order"])
def test_a_resumed_optimiser_goes_on_bit_for_bit_in_any_order_of_parameters(
    name: str, backwards: bool, tmp_path: Path
) -> None:
    network, optimizer = make(name)
    train(network, optimizer, range(4))
    write_tensors(tmp_path / "optimizer", optimizer_state(optimizer, NAMES), {})
    again, other = make(name, backwards)
    again.load_state_dict(network.state_dict())
    names = parameter_names(other, state_of({"g": again}))
    load_optimizer(other, names, read_tensors(tmp_path / "optimizer")[0])
    train(network, optimizer, range(4, 8))
    train(again, other, range(4, 8))
    assert same_bits(state_of({"g": network}), state_of({"g": again}))


def test_parameters_without_elements_are_told_apart() -> None:
    network = nn.ParameterDict({n: nn.Parameter(torch.zeros(0, i)) for i, n in enumerate("ab")})
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    assert parameter_names(optimizer, state_of({"g": network})) == ["g/a", "g/b"]


def test_a_parameter_that_no_network_has_is_refused() -> None:
    network, _ = make("adam")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=1.0)
    with pytest.raises(ValueError, match=r"of shape \(9,\).*network.parameters\(\)"):
        parameter_names(optimizer, state_of({"g": network}))


def test_state_of_another_model_is_refused() -> None:
    _, optimizer = make("adam")
    with pytest.raises(CheckpointError, match="'g/9.weight', which this model does not have"):
        load_optimizer(optimizer, NAMES, {"exp_avg|g/9.weight": torch.zeros(1)})


def test_a_field_that_is_no_tensor_is_refused() -> None:
    network, optimizer = make("momentum")
    train(network, optimizer, range(1))
    optimizer.state[next(network.parameters())]["history"] = [1, 2]
    with pytest.raises(ValueError, match="field 'history' is a list"):
        optimizer_state(optimizer, NAMES)
