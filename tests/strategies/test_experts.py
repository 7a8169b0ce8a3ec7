"""Experts: what each site makes of its own, how it is put together, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedwan
from fedwan.app import load_run
from fedwan.errors import ConfigError
from fedwan.models.experts import Experts
from fedwan.rng import NamedGenerators
from fedwan.simulation import Absence, simulate
from fedwan.state import State
from fedwan.weights import export
from fedwan.workloads.optim import build_optimizers
from tests.support import (
    ADAM,
    BATCH,
    NET,
    Ran,
    TinyWorkload,
    keep_local,
    run_tiny,
    same_bits,
    take_part,
    tiny_config,
    tiny_shard,
)

SITES, H, STEPS = 3, 4, 24


class TinyExperts(TinyWorkload):
    """One tiny network a site."""

    def __init__(self, inner: Any = NET) -> None:
        super().__init__(inner)
        self.networks = {name: Experts(net, SITES) for name, net in self.networks.items()}
        self.optimizers = build_optimizers(inner, self.networks)


def run(folder: Path, inner: Any = NET, **more: Any) -> Ran:
    sections = {"checkpoint": {"every": 1}} | more.pop("sections", {})
    config = tiny_config("experts", inner, sites=SITES, h=H, steps=STEPS, **sections)
    return run_tiny(folder, config, make=lambda: TinyExperts(inner), part=part, **more)


def part(member: Any, workload: TinyWorkload) -> None:
    take_part(member, workload, tiny_shard(int(member.name[1:]), num=10 * int(member.name[1:])))


def alone(site: int) -> State:
    """What a site's expert becomes without any federation."""
    workload = TinyWorkload({"velocity": ADAM})
    rng = NamedGenerators(0, f"s{site}")
    stream = tiny_shard(site, num=10 * site).loader(BATCH, rng["data"])
    for _ in range(STEPS):
        workload.step(next(stream), rng, keep_local)
    return dict(workload.networks["velocity"].state_dict())


def test_each_expert_is_what_its_site_makes_of_it_alone_which_alone_has_its_moments(
    tmp_path: Path,
) -> None:
    ran = run(tmp_path, {"velocity": ADAM})
    assert len(ran.hashes) == 1
    assert ran.state["velocity/num_samples"].tolist() == [[10], [20], [30]]
    for index in range(SITES):
        for name, value in alone(index + 1).items():
            mine = ran.state[f"velocity/experts.{index}.{name}"]
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)
        workload = ran.workloads[f"s{index + 1}"]
        experts, stepped = workload.networks["velocity"], workload.optimizers["velocity"].state
        assert isinstance(experts, Experts)
        each = [[p in stepped for p in expert.parameters()] for expert in experts.experts.values()]
        own = [place == index for place in range(SITES)]
        assert [all(held) for held in each] == [any(held) for held in each] == own


@pytest.mark.slow
@pytest.mark.parametrize("leaves_at", [0.0, 0.3])
def test_a_site_that_is_killed_costs_no_bit(leaves_at: float, tmp_path: Path) -> None:
    inner = {"velocity": ADAM}
    undisturbed = run(tmp_path / "a", inner)
    ran = run(tmp_path / "b", inner, absences={"s2": Absence(leaves_at, 0.9)})
    assert ran.result.totals.rejoins == 1
    assert same_bits(ran.state, undisturbed.state)


# The recipes -------------------------------------------------------------------------------------

SMALL = ("data.name=ring8", "data.split=by_label", "sites=2", "steps=8", "h=4", "eval.every=0")


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["flow", "gan"])
def test_a_run_leaves_an_ensemble_that_samples_and_is_exported_and_no_teacher(
    workload: str, tmp_path: Path
) -> None:
    config = load_run(None, [f"workload={workload}", "strategy=experts", *SMALL])
    ran = simulate(config, tmp_path / "run")
    assert {*ran.site_sha256.values()} == {fedwan.state.hash_state(ran.model.state)}
    own = sum(v.nbytes for name, v in ran.model.state.items() if "/experts.0." in name)
    assert ran.model.num_weight_bytes() == pytest.approx(own, abs=1000), "of one site's networks"
    sent = ran.totals.bytes_up / config.sites / (config.steps // config.h)
    assert sent < 2 * own, "its own expert; one site sends all initial weights besides"
    trained = fedwan.load(tmp_path / "run")
    network = {"flow": "velocity", "gan": "generator"}[workload]
    assert int(trained.networks[network]["num_samples"].sum()) > 1000
    samples = trained.workload().sample(6, 0)
    assert samples.shape == (6, 2) and torch.equal(samples, trained.workload().sample(6, 0))
    export(trained, "safetensors", tmp_path / "files")
    assert (tmp_path / "files" / f"{network}.safetensors").is_file()
    again = simulate(config, tmp_path / "run", resume=True)
    assert same_bits(again.model.ema, ran.model.ema)
    with pytest.raises(ConfigError, match={"flow": "has no one flow", "gan": "= 'gan'"}[workload]):
        load_run(None, ["workload=distill", "data.name=ring8", f"model.teacher={tmp_path / 'run'}"])


@pytest.mark.parametrize(
    ("words", "num_told"), [(["model.guidance=2"], 10), (["data.labels=site"], 2)]
)
def test_networks_that_are_told_the_class_are_asked_where_it_is(
    words: list[str], num_told: int, tmp_path: Path
) -> None:
    small = ("data.name=digits", "data.split=by_label", "sites=2", "steps=4", "h=4", "eval.num=20")
    own = ("workload=flow", "model.network=dit", "strategy=experts", *words)
    small += ("model.width=16", "model.depth=1", "model.heads=2", "model.euler_steps=2")
    simulate(load_run(None, [*own, *small]), tmp_path)
    trained = fedwan.load(tmp_path)
    counts = trained.networks["velocity"]["num_samples"]
    assert counts.shape == (2, num_told) and bool(((counts > 0).sum(0) == 1).all())
    assert trained.workload().sample(6, 0).shape[0] == 6
