"""What trains at a site, and what becomes of its inner optimisers' moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fedwan.simulate import SimulatedRun, SimulatedSite, simulate

from fedwan.codecs import fp32
from fedwan.config import InnerConfig
from fedwan.coordinator.merge import Merger
from fedwan.data.shard import Shard
from fedwan.fragments import Fragment, blocks, whole
from fedwan.rng import NamedGenerators
from fedwan.site.replica import Replica
from fedwan.state import State, hash_state
from fedwan.workloads.base import keep_local
from strategies import diloco, streaming_diloco
from tests.support import TinyWorkload, build_strategy, tiny_shard

BOTH = ("reset", "average")


def inner(state: str, name: str = "adam") -> dict[str, InnerConfig]:
    return {"net": InnerConfig(name, lr=1e-2, state=state), "other": InnerConfig(lr=1e-2)}


def trained(config: dict[str, InnerConfig], site: int, num_steps: int = 3) -> Replica:
    workload = TinyWorkload(config)
    replica = Replica(workload, config)
    rng = NamedGenerators(0, f"s{site}")
    stream = tiny_shard(site).loader(4, rng["data"])
    for _ in range(num_steps):
        workload.step(next(stream), rng, keep_local)
    return replica


def moments_of(replica: Replica, network: str) -> State:
    return {n: v for n, v in replica.optimizer_state().items() if n.startswith(f"{network}:")}


# Kept and forgotten ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["keep", "reset"])
def test_moments_stay_home_unless_they_are_averaged(state: str) -> None:
    replica = trained(inner(state), 1)
    assert set(replica.layout) == set(Replica(TinyWorkload(inner("keep"))).layout)
    assert not any("exp_avg" in name for name in replica.live)


def test_an_update_that_lands_resets_its_own_fragments_moments_alone() -> None:
    replica = trained(inner("reset"), 1)
    first, second = blocks(2, 4)(replica.layout)
    before = set(moments_of(replica, "net"))
    replica.land(first, alpha=0.0)
    left = {name.partition("|")[2] for name in moments_of(replica, "net")}
    assert left == {name for name in second.layout if name.startswith("net/")}
    assert left and len(moments_of(replica, "net")) < len(before)
    assert len(moments_of(replica, "other")) == len(before)
    replica.land(second, alpha=0.5)
    assert not moments_of(replica, "net")


def test_kept_moments_survive_a_landing_to_the_bit() -> None:
    replica = trained(inner("keep"), 1)
    before = hash_state(replica.optimizer_state())
    replica.land(*whole(replica.layout), alpha=0.0)
    replica.adopt(dict(replica.base))
    assert hash_state(replica.optimizer_state()) == before


def test_taking_the_global_weights_over_is_a_landing_too() -> None:
    replica = trained(inner("reset"), 1)
    replica.adopt({name: value.clone() for name, value in replica.base.items()})
    assert not moments_of(replica, "net") and moments_of(replica, "other")


# Averaged ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_averaged_moments_are_the_mean_of_the_sites(name: str) -> None:
    replicas = [trained(inner("average", name), site) for site in (1, 2)]
    (fragment,) = whole(replicas[0].layout)
    merger, codec = Merger(fragment.layout), fp32()
    for replica in replicas:
        payload, _ = codec.encode(replica.delta(), {}, fragment.layout)
        merger.add(codec.read_each(payload, fragment.layout), 1.0)
    merged = merger.take()
    fields = {n for n in merged if "|" in n}
    assert len(fields) == (1 if name == "sgd" else 3) * 4
    for field in fields:
        one, other = (replica.live[field] for replica in replicas)
        assert field.endswith("|step") or not torch.equal(one, other)
        torch.testing.assert_close(merged[field], (one + other) / 2)


def land_zeros(replica: Replica) -> Fragment:
    (fragment,) = whole(replica.layout)
    for value in replica.base.values():
        value.zero_()
    replica.land(fragment, alpha=0.0)
    return fragment


def test_landed_moments_are_those_that_the_optimiser_steps_with() -> None:
    replica = trained(inner("average"), 1)
    land_zeros(replica)
    assert not any(bool(v.any()) for v in moments_of(replica, "net").values())
    assert all(bool(v.any()) for v in moments_of(replica, "other").values())


def test_moments_that_were_loaded_or_forgotten_are_the_live_ones_again() -> None:
    replica = trained(inner("average"), 1)
    kept = {name: value.clone() for name, value in replica.optimizer_state().items()}
    replica.reset_optimizers()
    assert not any(bool(v.any()) for n, v in replica.live.items() if "|" in n)
    replica.load_optimizers(kept)
    for name, value in moments_of(replica, "net").items():
        field, _, param = name.removeprefix("net:").partition("|")
        assert value.data_ptr() == replica.live[f"{param}|{field}"].data_ptr()
        assert torch.equal(value, kept[name])


def test_other_weights_are_shown_without_a_trace_in_the_moments() -> None:
    replica = trained(inner("average"), 1)
    before = hash_state(replica.live)
    with replica.showing({name: torch.zeros_like(v) for name, v in replica.base.items()}):
        assert hash_state(replica.live) != before
    assert hash_state(replica.live) == before


def simulated(folder: Path, config: dict[str, InnerConfig], recipe: object) -> SimulatedRun:
    strategy = build_strategy(recipe, config, sites=2, h=2, up="int4")  # type: ignore[arg-type]
    shards: list[Shard] = [tiny_shard(site) for site in (1, 2)]
    sites = {f"s{i + 1}": SimulatedSite(TinyWorkload(config), s) for i, s in enumerate(shards)}
    return simulate(sites, strategy, folder, num_steps=16, batch=4, inner=config)


@pytest.mark.parametrize("recipe", [diloco, streaming_diloco], ids=["diloco", "streaming"])
@pytest.mark.parametrize("state", BOTH)
def test_all_parties_of_a_run_end_on_the_same_bits(
    tmp_path: Path, state: str, recipe: object
) -> None:
    runs = {s: simulated(tmp_path / s, inner(s), recipe) for s in ("keep", state)}
    for run in runs.values():
        assert set(run.site_sha256.values()) == {hash_state(run.model.state)}
    kept, other = (runs[s].model for s in ("keep", state))
    assert not torch.equal(kept.state["net/first.weight"], other.state["net/first.weight"])
    assert other.num_weight_bytes() == kept.num_weight_bytes() == kept.num_bytes()
    if state == "average":
        # With an overlap, steps that were taken while an update flew are not in it.
        count = float(other.state["net/first.weight|step"])
        assert count == 16 if recipe is diloco else 0 < count < 16
        assert 2 * kept.num_bytes() - 8 < other.num_bytes() < 3 * kept.num_bytes()
