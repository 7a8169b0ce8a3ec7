"""How a LightningModule is cut into networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedwan.errors import ConfigError
from fedwan.lightning.networks import split_module
from fedwan.optim_state import parameter_names
from fedwan.state import state_of


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(1, 2), nn.Linear(2, 3), nn.Linear(3, 4)
        self.bias = nn.Parameter(torch.zeros(5))


def sgd(*parts: object) -> torch.optim.Optimizer:
    params = [
        p for part in parts for p in (part.parameters() if isinstance(part, nn.Module) else [part])
    ]
    return torch.optim.SGD(params, lr=0.1)  # type: ignore[arg-type]


def test_an_optimiser_of_one_child_makes_a_network_of_its_name_and_others_are_frozen() -> None:
    module = Module()
    optimizers = [sgd(module.second), sgd(module.first)]
    parts = split_module(module, optimizers)
    assert list(parts.networks) == ["second", "first", "third"]
    assert parts.networks["second"] is module.second
    assert list(parts.optimizers.items()) == list(zip(("second", "first"), optimizers, strict=True))


def test_children_and_bare_parameters_of_one_optimiser_are_one_network_and_share_memory() -> None:
    module = Module()
    parts = split_module(module, [sgd(module.first, module.bias), sgd(module.third)])
    assert list(parts.optimizers) == ["first_bias", "third"]
    state = state_of(parts.networks)
    assert state["first_bias/first.weight"].data_ptr() == module.first.weight.data_ptr()
    assert state["first_bias/bias"].data_ptr() == module.bias.data_ptr()
    for name, optimizer in parts.optimizers.items():
        own = {n: t for n, t in state.items() if n.startswith(f"{name}/")}
        assert set(parameter_names(optimizer, own)) == set(own)


def test_a_single_optimiser_of_several_children_trains_the_model() -> None:
    module = Module()
    parts = split_module(module, [sgd(module)])
    assert list(parts.networks) == ["model"]
    assert len(list(parts.networks["model"].parameters())) == 7


def test_a_child_of_two_optimisers_is_refused() -> None:
    module = Module()
    optimizers = [sgd(module.first), sgd(module.first.bias, module.second)]
    with pytest.raises(ConfigError, match="optimisers 0 and 1 of Module both train 'first'; give"):
        split_module(module, optimizers)


def test_a_parameter_of_no_attribute_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(9,\) that is not the module's; assign it"):
        split_module(Module(), [sgd(nn.Parameter(torch.ones(9)))])


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="Module.configure_optimizers returns no optimiser"):
        split_module(Module(), [])
