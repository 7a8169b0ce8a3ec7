"""Optimisers' state under their parameters' names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedwan.codecs import fp32
from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError, UserError
from fedwan.fragments import whole
from fedwan.optim_state import NamedOptimizers
from fedwan.site.checkpoint import pack, unpack
from fedwan.site.replica import Replica
from fedwan.state import read_tensors, state_of, write_tensors
from tests.support import same_bits


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers beside a moment, as some optimisers of other libraries do."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": np.float64(1e-2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {"step": 0, "size": 0.5, "is_late": False, "sum": param * 0}
                    state["before"] = None
                state["step"] += 1
                state["size"] = 0.5 * state["size"] + float(param.norm())
                state["is_late"] = state["step"] > 5
                state["sum"] += param.grad * (2 if state["is_late"] else 1)
                assert state["before"] is None
                param -= group["lr"] * state["sum"] / (state["size"] * state["step"])


class Remembering(torch.optim.Optimizer):
    """Has more to say in `state_dict` than torch, and masters that torch would round."""

    num_steps = 0

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                held = self.state[param].setdefault("held", param.double())
                param.copy_(held.sub_(group["lr"] / self.num_steps * param.grad))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict.pop("num_steps")
        super().load_state_dict(state_dict)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "counting": Counting,
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "remembering": Remembering,
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
    kept = named.state() | {"groups:": pack("optimizer", named.groups())}
    write_tensors(tmp_path / "optimizer", kept, {})
    again, other = make(name, backwards)
    again.load_state_dict(network.state_dict())
    flat, _ = read_tensors(tmp_path / "optimizer")
    groups = flat.pop("groups:")
    other.load(flat)
    other.load_groups(unpack("optimizer", groups))
    train(network, named, range(4, 8))
    train(again, other, range(4, 8))
    assert same_bits(state_of({"g": network}), state_of({"g": again}))
    assert same_bits(named.state(), other.state())


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_rate_that_the_script_has_lowered_is_told_where_the_saved_one_holds(
    is_scheduled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def named(lr: float, steps: int) -> NamedOptimizers:
        network = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(network.parameters(), lr)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5) if is_scheduled else None
        for _ in range(steps if scheduler else 0):
            optimizer.step()
            scheduler.step()
        return NamedOptimizers.of({"g": network}, {"o": optimizer})

    saved = named(0.1, 9).groups()
    with caplog.at_level("INFO"):
        named(0.1, 0).load_groups(saved)
        assert not caplog.messages, "a scheduler goes on by itself"
        named(0.05, 0).load_groups(saved)
    assert caplog.messages[0].endswith("0.1, as saved; the script has 0.05")
    with pytest.raises(CheckpointError, match="has optimizers\\['adam'\\], .* gives 'o'; name"):
        named(0.1, 0).load_groups({"adam": saved["o"]})


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


def test_moments_and_gradients_lie_in_memory_as_their_parameters_do() -> None:
    """Fused optimisers go through memory, and what was sent or saved lies row by row."""
    network = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, fused=True)
    replica = Replica({"net": network}, {"net": optimizer})
    values = torch.arange(108.0).reshape(6, 2, 3, 3)
    replica.inner.load({"net:exp_avg|net/weight": values})
    (fragment,) = whole(replica.layout)
    sent = {"net/bias": torch.arange(6.0), "net/weight": values}
    payload, _ = fp32().encode(sent, {}, fragment.layout)
    replica.apply_gradients(payload, fragment, fp32())
    for value in (optimizer.state[network.weight]["exp_avg"], network.weight.grad):
        assert value is not None and value.stride() == network.weight.stride()
        assert torch.equal(value, values)


def test_moments_and_fields_that_cannot_be_named_are_refused() -> None:
    network, named = make("momentum")
    with pytest.raises(CheckpointError, match=r"'g:exp_avg\|g/9.weight' is of no parameter"):
        named.load({"g:exp_avg|g/9.weight": torch.zeros(1)})
    train(network, named, range(1))
    named.optimizers["g"].state[next(network.parameters())]["history"] = [1, 2]
    with pytest.raises(UserError, match="keeps 'history', which no checkpoint"):
        NamedOptimizers.of({"g": network}, named.optimizers)
