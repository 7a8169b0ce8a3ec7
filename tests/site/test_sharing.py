"""Several processes take a site's steps together; each is started for real."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fedwan.simulate import SimulatedRun, SimulatedSite, simulate
from fedwan.site.follower import shared
from fedwan.site.service import check_gpus
from torch import Tensor

from fedwan.config import Config, DataConfig, InnerConfig, SiteConfig
from fedwan.data import open_shard
from fedwan.errors import ConfigError, FedwanError
from fedwan.recipes import resolve_strategy
from fedwan.rng import NamedGenerators
from fedwan.site import follower
from fedwan.state import hash_state
from fedwan.workloads.base import Batch, keep_local
from fedwan.workloads.settings import resolve_page
from sites import flow, gan
from strategies import diloco, parameter_server, sync

CPU = torch.device("cpu")


def config(recipe: ModuleType = flow, strategy: ModuleType = diloco, **more: int) -> Config:
    model = {"width": 16, "depth": 1} if recipe is flow else {"width": 8}
    name = strategy.__name__.rpartition(".")[2]
    asked = Config(
        workload=recipe.__name__.rpartition(".")[2],
        strategy=name,
        sites=2,
        steps=more.get("steps", 8),
        h=4 if name == "diloco" else 1,
        threads=1,
        data=DataConfig(batch=8),
        model=model,
        site=SiteConfig(processes=2, accumulate=more.get("accumulate", 1)),
    )
    resolve_page(recipe, asked)
    resolve_strategy(strategy, asked, recipe.NETWORKS)
    return asked


def batch(seed: int) -> Batch:
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return Batch(x, torch.arange(8))


def gradients(workload: flow.Flow) -> list[Tensor]:
    return [
        p.grad.clone() for p in workload.networks["velocity"].parameters() if p.grad is not None
    ]


def test_two_processes_average_their_gradients_and_follow_what_lands() -> None:
    asked = config()
    alone, workload = flow.build(asked, CPU), flow.build(asked, CPU)
    twin = copy.deepcopy(alone.networks)
    seen: list[list[Tensor]] = []
    rng, again = NamedGenerators(0, "s1"), NamedGenerators(0, "s1")
    with shared(workload, asked, CPU) as leader:
        leader.step(batch(0), rng, lambda names: seen.append(gradients(workload)))
        for index in range(1, 4):
            with torch.no_grad():  # as an update lands, between two steps
                next(workload.networks["velocity"].parameters()).mul_(0.9)
            workload.optimizers["velocity"].param_groups[0]["lr"] = 1e-3 / index
            if index == 3:
                workload.optimizers["velocity"].state.clear()
            leader.step(batch(index), rng, keep_local)
    # That both ended on the same weights is checked where the others are let go.
    parts: list[list[Tensor]] = []
    draw = int(torch.randint(1 << 62, (), generator=again["team"]))
    for rank, generators in enumerate((again, NamedGenerators(draw, "process 1"))):
        alone.networks["velocity"].load_state_dict(twin["velocity"].state_dict())
        part = Batch(*(t.chunk(2)[rank] for t in batch(0)))
        alone.step(part, generators, lambda names: parts.append(gradients(alone)))
    expected = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
    torch.testing.assert_close(seen[0], expected)


def ran_with(folder: Path, asked: Config, recipe: ModuleType, strategy: ModuleType) -> SimulatedRun:
    """A run of two sites, of which the first has two processes."""
    plain = copy.deepcopy(asked)
    plain.site.processes = 1
    shards = [open_shard(asked.data, site, 2, 0) for site in range(2)]
    with shared(recipe.build(asked, CPU), asked, CPU) as leader:
        sites = {
            "s1": SimulatedSite(leader, shards[0]),
            "s2": SimulatedSite(recipe.build(plain, CPU), shards[1]),
        }
        return simulate(
            sites, strategy.build(asked), folder, num_steps=asked.steps, batch=8, inner=asked.inner
        )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [diloco, sync], ids=["diloco", "sync"])
def test_a_site_of_two_processes_takes_part_like_any_other(
    tmp_path: Path, strategy: ModuleType
) -> None:
    asked = config(gan, strategy, accumulate=2)
    ran = ran_with(tmp_path, asked, gan, strategy)
    assert set(ran.site_sha256.values()) == {hash_state(ran.model.state)}
    rounds = [row for row in ran.records if row["kind"] == "round" and row["site"] == "s1"]
    assert sum(row["samples"] for row in rounds) == 8 * 8


@pytest.mark.slow
def test_processes_follow_weights_that_came_instead_of_gradients(tmp_path: Path) -> None:
    asked = config(gan, parameter_server)
    ran = ran_with(tmp_path, asked, gan, parameter_server)  # and all processes ended alike
    assert hash_state(ran.model.state) in ran.site_sha256.values()


@pytest.mark.slow
def test_a_process_that_is_killed_ends_its_site_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = follower._start
    monkeypatch.setattr(follower, "_start", lambda *a: started.append(start(*a)) or started[-1])
    rng = NamedGenerators(0, "s1")
    asked = config()
    with (
        pytest.raises(FedwanError, match="process 1 of this site ended with code -9"),
        shared(flow.build(asked, CPU), asked, CPU) as leader,
    ):
        leader.step(batch(0), rng, keep_local)
        started[0].kill()
        for index in range(3):
            leader.step(batch(index), rng, keep_local)


@pytest.mark.slow
def test_a_process_that_cannot_begin_ends_its_site_in_one_line() -> None:
    asked = config()
    workload = flow.build(asked, CPU)
    asked.workload = "flow_of_another_machine"
    with (
        pytest.raises(FedwanError, match="process 1 of this site ended with code 2"),
        shared(workload, asked, CPU),
    ):
        pass


def test_a_batch_that_processes_cannot_share_evenly_is_refused() -> None:
    asked = Config(data=DataConfig(batch=10), site=SiteConfig(processes=4))
    with pytest.raises(ConfigError, match="site.processes=4 with .* 10 samples .*data.batch=12"):
        resolve_page(flow, asked)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(2, torch.device("cuda"))
    check_gpus(8, CPU)
    with pytest.raises(ConfigError, match="site.processes = 3 is more than the 2 GPUs"):
        check_gpus(3, torch.device("cuda"))


def test_one_process_is_the_workload_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Config(inner={"velocity": InnerConfig()})
    resolve_page(flow, asked)
    workload = flow.build(asked, CPU)
    monkeypatch.setattr(follower, "_start", None)
    with shared(workload, asked, CPU) as same:
        assert same is workload
