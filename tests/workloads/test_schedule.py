"""Learning rates over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fedwan.simulate import Absence, SimulatedSite, simulate
from torch import Tensor, nn

from fedwan import simulate as simulation
from fedwan.codecs import plain
from fedwan.config import Config, InnerConfig
from fedwan.coordinator import rounds
from fedwan.recipes import resolve_strategy
from fedwan.rng import NamedGenerators
from fedwan.state import Role, TensorSpec, hash_state
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.schedule import rate_at, set_rates
from strategies import async_diloco, diloco, parameter_server, sync
from tests.support import ADAM, TinyWorkload, tiny_shard

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


def train(recipe: Any, h: int, steps: int, folder: Path) -> list[NotingWorkload]:
    config = resolved(recipe, h, steps)
    workloads = [make(), make()]
    sites = {f"s{i}": SimulatedSite(w, tiny_shard(i)) for i, w in enumerate(workloads)}
    ran = simulate(
        sites, recipe.build(config), folder, num_steps=steps, batch=4, inner=config.inner
    )
    assert {hash_state(ran.model.state)} == set(ran.site_sha256.values())
    return workloads


@pytest.mark.parametrize(("recipe", "h"), [(sync, 1), (diloco, 4)])
def test_every_site_follows_the_run_s_schedule(recipe: Any, h: int, tmp_path: Path) -> None:
    # With sync the coordinator steps too: its weights are the sites' to the last bit.
    for workload in train(recipe, h, 20, tmp_path):
        assert workload.rates == [rate_at(COSINE, step, 20) for step in range(20)]


@pytest.mark.parametrize(("recipe", "h"), [(parameter_server, 1), (async_diloco, 4)])
def test_at_a_pace_of_its_own_a_site_follows_the_run(recipe: Any, h: int, tmp_path: Path) -> None:
    schedule = [rate_at(COSINE, step, 40) for step in range(40)]
    workloads = train(recipe, h, 40, tmp_path)
    for workload in workloads:
        assert workload.rates[0] == schedule[0]
        assert set(workload.rates) <= set(schedule)
    # Whoever took the last steps was at the run's end; a site that a busy machine held up may not.
    assert min(workload.rates[-1] for workload in workloads) < 0.2 * COSINE.lr


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


def test_a_site_that_was_away_goes_on_at_the_others_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "TICK_S", 0.02)
    monkeypatch.setattr(simulation, "STANDSTILL_S", 1.0)
    config = resolved(diloco, 4, 80, sites=3)
    config.round.quorum, config.round.grace, config.round.patience_s = 2, 3.0, 30.0
    back: list[NotingWorkload] = []

    def again() -> NotingWorkload:
        back.append(make())
        return back[-1]

    sites = {f"s{i}": SimulatedSite(make(), tiny_shard(i), rebuild=again) for i in range(3)}
    simulate(
        sites,
        diloco.build(config),
        tmp_path,
        num_steps=80,
        batch=4,
        absences={"s1": Absence(0.25, 0.6)},
        inner=config.inner,
    )
    (returned,) = back
    rates = [rate_at(COSINE, step, 80) for step in range(80)]
    assert returned.rates == rates[-len(returned.rates) :]
    assert len(returned.rates) < 40, "the others had gone on"
