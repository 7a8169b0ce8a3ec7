"""Optimisers' state under their parameters' names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError, UserError
from fedwan.optim_state import NamedOptimizers
from fedwan.state import read_tensors, state_of, write_tensors
from tests.support import same_bits

MAKERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def make(name: str, backwards: bool = False) -> tuple[nn.Module, NamedOptimizers]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = list(network.parameters())
    optimizer = MAKERS[name](params[::-1] if backwards else params)
    return network, NamedOptimizers.of({"g": network}, {"g": optimizer})


def train(network: nn.Module, named: NamedOptimizers, steps: range) -> None:
    (optimizer,) = named.optimizers.values()
    for step in steps:
        optimizer.zero_grad()
        network(torch.full((5, 3), float(step))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("backwards", [False, True], ids=["same_order", "other_order"])
def test_a_resumed_optimiser_goes_on_bit_for_bit_in_any_order_of_parameters(
    name: str, backwards: bool, tmp_path: Path
) -> None:
    network, named = make(name)
    train(network, named, range(4))
    write_tensors(tmp_path / "optimizer", named.state(), {})
    again, other = make(name, backwards)
    again.load_state_dict(network.state_dict())
    other.load(read_tensors(tmp_path / "optimizer")[0])
    train(network, named, range(4, 8))
    train(again, other, range(4, 8))
    assert same_bits(state_of({"g": network}), state_of({"g": again}))


@pytest.mark.parametrize(
    ("setting", "device"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")]
)
def test_steps_are_counted_where_torch_counts_them(setting: str, device: str) -> None:
    network = nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.AdamW(network.parameters())
    optimizer.param_groups[0][setting] = True
    named = NamedOptimizers.of({"g": network}, {"o": optimizer})
    named.load({"o:step|g/weight": torch.tensor(3.0), "o:exp_avg|g/weight": torch.zeros(2, 3)})
    assert optimizer.state[network.weight]["step"].device.type == device
    assert optimizer.state[network.weight]["exp_avg"].device.type == "meta"
    named.forget()
    named.begin({"g": InnerConfig(name="adamw")})
    assert optimizer.state[network.bias]["step"].device.type == device


def test_parameters_moments_and_fields_that_cannot_be_named_are_refused() -> None:
    network, named = make("momentum")
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=1.0)
    with pytest.raises(UserError, match=r"of shape \(9,\) that is in none of the networks g"):
        NamedOptimizers.of({"g": network}, {"o": foreign})
    with pytest.raises(CheckpointError, match=r"'g:exp_avg\|g/9.weight' is of no parameter"):
        named.load({"g:exp_avg|g/9.weight": torch.zeros(1)})
    train(network, named, range(1))
    named.optimizers["g"].state[next(network.parameters())]["history"] = [1, 2]
    with pytest.raises(UserError, match="keeps 'history' as a list"):
        named.state()
