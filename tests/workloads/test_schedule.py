"""Learning rates over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedwan.codecs import plain
from fedwan.config import Config, InnerConfig
from fedwan.recipes import resolve_strategy
from fedwan.rng import NamedGenerators
from fedwan.state import Role, TensorSpec
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.optim import rate_at, set_rates
from strategies import parameter_server
from tests.support import ADAM, TinyWorkload

COSINE = replace(ADAM, warmup_steps=3, schedule="cosine")


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_are_torch_s_own(schedule: str) -> None:
    config = InnerConfig(lr=0.4, schedule=schedule)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.4)
    peers = {
        "constant": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "linear": torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    }
    scheduler = peers[schedule]
    for group in optimizer.param_groups:
        group["lr"] = 0.4
    theirs = []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
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


class NotingWorkload(TinyWorkload):
    """Notes the rate of every step."""

    def __init__(self, inner: Mapping[str, InnerConfig]) -> None:
        super().__init__(inner)
        self.rates: list[float] = []

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        self.rates.append(self.optimizers["velocity"].param_groups[0]["lr"])
        return super().step(batch, rng, reduce)


def make() -> NotingWorkload:
    return NotingWorkload({"velocity": COSINE})


def resolved(recipe: Any, h: int, steps: int, sites: int = 2) -> Config:
    name = recipe.__name__.rpartition(".")[2]
    config = Config(strategy=name, sites=sites, h=h, steps=steps, inner={"velocity": COSINE})
    resolve_strategy(recipe, config, {"velocity": "regression"})
    return config


def test_the_parameter_server_steps_with_the_run_s_rate(tmp_path: Path) -> None:
    """With SGD and a constant gradient the weights move by the sum of the rates."""
    config = resolved(parameter_server, 1, 10, sites=1)
    inner = {"g": InnerConfig("sgd", lr=1.0, beta1=0.0, schedule="linear")}
    config.inner = dict(inner)
    layout = {"g/w": TensorSpec(torch.Size([1]), torch.float32, Role.PARAMETER)}
    model = {"g/w": torch.zeros(1)}
    step = parameter_server.build(config).server_step(model, layout)
    for run_step in range(10):
        step.begin(run_step)
        step.commit(plain(step.propose({"g/w": torch.ones(1)})))
    assert model["g/w"].item() == pytest.approx(-sum(1 - step / 10 for step in range(10)))
