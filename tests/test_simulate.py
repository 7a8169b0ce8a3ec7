"""Whole runs in one process: what coordinator, sites, codecs and strategies do together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.coordinator.server_step import step_outer
from fedwan.errors import JoinRefused
from fedwan.link.base import Link
from fedwan.outer import nesterov
from fedwan.rng import NamedGenerators
from fedwan.simulate import SimulatedRun, SimulatedSite, simulate
from fedwan.state import State, hash_state, layout_of, state_of
from fedwan.strategy import Strategy
from fedwan.workloads.base import keep_local
from strategies import diloco, local_sgd, sync
from tests.support import (
    ADAM,
    SGD,
    DawdlingLink,
    PoisoningLink,
    TinyWorkload,
    build_strategy,
    same_bits,
    tiny_shard,
)

BATCH = 4
NET = {"velocity": ADAM}
GAN = {"discriminator": ADAM, "generator": SGD}


class Ran(NamedTuple):
    """A run and the workloads that it trained."""

    result: SimulatedRun
    workloads: dict[str, TinyWorkload]

    @property
    def state(self) -> State:
        return self.result.model.state

    @property
    def hashes(self) -> set[str]:
        """Of the coordinator's final weights and of every site's: one if all agree."""
        return {hash_state(self.state), *self.result.site_sha256.values()}


def run(
    folder: Path,
    strategy: Strategy,
    inner: Mapping[str, InnerConfig],
    *,
    sites: int = 2,
    steps: int = 8,
    norm: bool = False,
    wrap: Callable[[str, Link], Link] = lambda _, link: link,
) -> Ran:
    workloads = {f"s{i + 1}": TinyWorkload(inner, norm=norm) for i in range(sites)}
    members = {
        name: SimulatedSite(workload, tiny_shard(index))
        for index, (name, workload) in enumerate(workloads.items())
    }
    result = simulate(members, strategy, folder, num_steps=steps, batch=BATCH, wrap=wrap)
    return Ran(result, workloads)


def train_plainly(inner: Mapping[str, InnerConfig], sites: int, steps: int) -> TinyWorkload:
    """One process that steps on the batches of all sites at once: large-batch training."""
    workload = TinyWorkload(inner)
    rngs = [NamedGenerators(0, f"s{index + 1}") for index in range(sites)]
    streams = [tiny_shard(index).loader(BATCH, rng["data"]) for index, rng in enumerate(rngs)]
    for _ in range(steps):
        parts: list[Tensor] = []
        for stream, rng in zip(streams, rngs, strict=True):
            x = next(stream).x
            workload.batches.append(x)
            parts.append(x + 0.01 * torch.randn(x.shape, generator=rng["noise"]))
        workload.step_on(torch.cat(parts), keep_local)
    workload.rng = rngs[0]
    return workload


def weights(workload: TinyWorkload) -> State:
    return {name: value.clone() for name, value in state_of(workload.networks).items()}


def rounds(run: Ran) -> list[dict[str, object]]:
    return [row for row in run.result.records if row["kind"] == "round"]


def averaging_by_nesterov(h: int) -> Strategy:
    """DiLoCo with outer lr 1 and momentum 0."""
    step = step_outer({name: nesterov(1.0, 0.0) for name in NET})
    return build_strategy(diloco, NET, sites=1, h=h)._replace(server_step=step)


# Against plain training --------------------------------------------------------------------------


@pytest.mark.parametrize("h", [1, 4, 8])
def test_one_site_with_outer_lr_1_is_plain_training_at_any_h(h: int, tmp_path: Path) -> None:
    ran = run(tmp_path, averaging_by_nesterov(h), NET, sites=1)
    plain = train_plainly(NET, sites=1, steps=8)
    mine = ran.workloads["s1"]
    torch.testing.assert_close(ran.state, weights(plain), rtol=1e-5, atol=1e-6)
    assert len(mine.batches) == 8
    assert all(torch.equal(a, b) for a, b in zip(mine.batches, plain.batches, strict=True))
    assert mine.rng is not None and plain.rng is not None
    assert same_bits(mine.rng.state(), plain.rng.state())
    assert len(ran.hashes) == 1


def test_local_sgd_with_h_1_and_inner_sgd_is_large_batch_training(tmp_path: Path) -> None:
    inner = {"velocity": SGD}
    ran = run(tmp_path, build_strategy(local_sgd, inner, sites=3, h=1), inner, sites=3)
    plain = train_plainly(inner, sites=3, steps=8)
    torch.testing.assert_close(ran.state, weights(plain), rtol=1e-4, atol=1e-5)
    assert len(ran.hashes) == 1


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_sync_is_large_batch_training_with_one_optimiser_everywhere(
    clip_norm: float, tmp_path: Path
) -> None:
    inner = {"velocity": InnerConfig(name="adamw", lr=1e-2, clip_norm=clip_norm)}
    ran = run(tmp_path, build_strategy(sync, inner, sites=3, h=1), inner, sites=3)
    plain = train_plainly(inner, sites=3, steps=8)
    torch.testing.assert_close(ran.state, weights(plain), rtol=1e-3, atol=1e-4)
    assert len(ran.hashes) == 1
    states = [w.optimizers["velocity"].state_dict()["state"] for w in ran.workloads.values()]
    for index, fields in states[0].items():
        for other in states[1:]:
            assert same_bits(fields, other[index])


# Agreement ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch_norm"])
@pytest.mark.parametrize("down", ["fp32", "bf16"])
@pytest.mark.parametrize(("recipe", "h"), [(diloco, 2), (local_sgd, 2), (sync, 1)])
def test_every_site_ends_on_the_coordinators_bits(
    recipe: object, h: int, down: str, norm: bool, tmp_path: Path
) -> None:
    strategy = build_strategy(recipe, GAN, sites=2, h=h, up="bf16", down=down)  # type: ignore[arg-type]
    ran = run(tmp_path, strategy, GAN, norm=norm, steps=4)
    assert len(ran.hashes) == 1


@pytest.mark.parametrize(("recipe", "h"), [(diloco, 2), (sync, 1)])
def test_the_order_of_arrival_does_not_change_a_bit(recipe: object, h: int, tmp_path: Path) -> None:
    strategy = build_strategy(recipe, NET, sites=3, h=h)  # type: ignore[arg-type]
    hashes = set()
    for attempt in range(3):
        ran = run(
            tmp_path / str(attempt),
            strategy,
            NET,
            sites=3,
            wrap=lambda name, link, attempt=attempt: DawdlingLink(link, (name, attempt)),  # type: ignore[misc]
        )
        hashes |= ran.hashes
    assert len(hashes) == 1


def test_h_counts_steps_and_rounds_count_versions(tmp_path: Path) -> None:
    ran = run(tmp_path, build_strategy(diloco, NET, sites=2, h=4), NET, steps=12)
    assert ran.result.model.versions == [3]
    assert ran.result.totals.contributions == 6
    assert [(r["version"], r["site"], r["step"], r["samples"]) for r in rounds(ran)] == [
        (version, site, 4 * version, 4 * BATCH) for version in (1, 2, 3) for site in ("s1", "s2")
    ]


# Buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "h"), [(diloco, 2), (local_sgd, 4), (sync, 1)])
def test_batch_norm_statistics_stay_sound(recipe: object, h: int, tmp_path: Path) -> None:
    strategy = build_strategy(recipe, NET, sites=3, h=h)  # type: ignore[arg-type]
    ran = run(tmp_path, strategy, NET, sites=3, norm=True)
    for state in (ran.state, ran.result.model.ema):
        assert bool((state["velocity/norm.running_var"] > 0).all())
        assert int(state["velocity/norm.num_batches_tracked"]) == 8
    for workload in ran.workloads.values():
        assert same_bits(weights(workload), ran.state)


def test_running_variances_contain_the_distance_between_sites(tmp_path: Path) -> None:
    """Sites whose data lie apart: the merged variance is that of all data, not the mean of two."""
    apart = run(
        tmp_path / "a", build_strategy(local_sgd, NET, sites=3, h=8), NET, sites=3, norm=True
    )
    alone = run(
        tmp_path / "b", build_strategy(local_sgd, NET, sites=1, h=8), NET, sites=1, norm=True
    )
    name = "velocity/norm.running_var"
    assert float(apart.state[name].sum()) > float(alone.state[name].sum())


# Faults ------------------------------------------------------------------------------------------


def test_a_contribution_that_is_not_finite_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    layout = layout_of(TinyWorkload(NET).networks)
    ran = run(
        tmp_path,
        build_strategy(diloco, NET, sites=2, h=2),
        NET,
        wrap=lambda name, link: PoisoningLink(link, layout, 1) if name == "s2" else link,
    )
    totals = ran.result.totals
    assert (totals.rejected, totals.contributions, ran.result.model.versions) == (1, 8, [4])
    assert len(ran.hashes) == 1
    for state in (ran.state, ran.result.model.ema):
        assert all(bool(value.isfinite().all()) for value in state.values())
    (event,) = [r for r in ran.result.records if r.get("event") == "rejected"]
    assert event["site"] == "s2" and "not finite" in event["text"] and "\n" not in event["text"]


def test_a_refused_contribution_leaves_the_global_weights_as_they_were(tmp_path: Path) -> None:
    """The site tries again from the same weights: only its data have moved on."""
    layout = layout_of(TinyWorkload(NET).networks)
    strategy = build_strategy(diloco, NET, sites=1, h=2)
    poisoned = run(
        tmp_path / "a",
        strategy,
        NET,
        sites=1,
        steps=4,
        wrap=lambda _, k: PoisoningLink(k, layout, 1),
    )
    first = [row["norms"] for row in rounds(poisoned)][0]
    clean = run(tmp_path / "b", strategy, NET, sites=1, steps=4)
    assert first == [row["norms"] for row in rounds(clean)][0]
    assert len(poisoned.workloads["s1"].batches) == len(clean.workloads["s1"].batches) + 2
    assert len(poisoned.hashes) == 1


def test_sites_that_begin_with_other_weights_are_refused_at_once(tmp_path: Path) -> None:
    strategy = build_strategy(diloco, NET, sites=2, h=2)
    members = {
        name: SimulatedSite(TinyWorkload(NET, seed=seed), tiny_shard(seed))
        for seed, name in enumerate(("s1", "s2"))
    }
    began = time.monotonic()
    with pytest.raises(JoinRefused, match="initial weights hash to .*use the same seed") as raised:
        simulate(members, strategy, tmp_path, num_steps=4, batch=BATCH)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("at", [0, 3], ids=["in_the_first_step", "later"])
def test_a_workloads_own_error_ends_the_simulation_and_is_the_one_that_is_raised(
    at: int, tmp_path: Path
) -> None:
    class Broken(TinyWorkload):
        def step_on(self, x: Tensor, reduce: object) -> dict[str, Tensor]:
            if len(self.batches) > at:
                raise ZeroDivisionError("a bug in the workload")
            return super().step_on(x, reduce)  # type: ignore[arg-type]

    members = {
        "s1": SimulatedSite(TinyWorkload(NET), tiny_shard(0)),
        "s2": SimulatedSite(Broken(NET), tiny_shard(1)),
    }
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="a bug in the workload"):
        simulate(
            members, build_strategy(sync, NET, sites=2, h=1), tmp_path, num_steps=8, batch=BATCH
        )
    assert time.monotonic() - began < 10


def test_a_coordinators_own_error_is_the_one_that_is_raised(tmp_path: Path) -> None:
    def broken(model: State, layout: object) -> object:
        raise ZeroDivisionError("a bug in the strategy")

    strategy = build_strategy(diloco, NET, sites=2, h=2)._replace(server_step=broken)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError, match="a bug in the strategy"):
        run(tmp_path, strategy, NET)


def test_a_network_s_moving_average_has_its_own_half_life_throughout_a_run(tmp_path: Path) -> None:
    strategy = build_strategy(local_sgd, GAN, sites=1, h=2)
    averages: list[State] = []
    for own in ({}, {"generator": 1e-3}):
        members = {"s1": SimulatedSite(TinyWorkload(GAN), tiny_shard(0))}
        folder = tmp_path / str(len(averages))
        numbers = {"num_steps": 8, "batch": BATCH, "ema_half_life": 30.0}
        model = simulate(members, strategy, folder, ema_half_lives=own, **numbers).model  # type: ignore[arg-type]
        averages.append(model.ema)
    usual, other = averages
    changed = {name for name in usual if not torch.equal(usual[name], other[name])}
    assert changed == {name for name in usual if name.startswith("generator/")}
    assert all(torch.equal(other[name], model.state[name]) for name in changed)
