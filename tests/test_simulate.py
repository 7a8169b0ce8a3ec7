"""Whole runs in one process: what coordinator, sites, codecs and strategies do together."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fedwan
from fedwan.app import load_run
from fedwan.config import InnerConfig
from fedwan.errors import JoinRefused, RunStopped, UserError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Link
from fedwan.protocol import policy
from fedwan.rng import NamedGenerators
from fedwan.simulation import Absence
from fedwan.site import joining, stub
from fedwan.site.flight import Anew
from fedwan.site.place import Place
from fedwan.site.site import Membership
from fedwan.state import State, read_tensors_meta, state_of
from fedwan.workloads.base import Batch
from strategies import diloco, local_sgd, sync
from tests.planes import eventually
from tests.support import (
    ADAM,
    BATCH,
    NET,
    SGD,
    PoisoningLink,
    TinyWorkload,
    WrappedLink,
    build_strategy,
    hub_of,
    keep_local,
    run_tiny,
    same_bits,
    take_part,
    tiny_config,
    tiny_shard,
)


def train_plainly(inner: Mapping[str, InnerConfig], sites: int, steps: int) -> TinyWorkload:
    """One process that steps on the batches of all sites at once: large-batch training."""
    workload = TinyWorkload(inner)
    rngs = [NamedGenerators(0, f"s{index + 1}") for index in range(sites)]
    streams = [tiny_shard(index).loader(BATCH, rng["data"]) for index, rng in enumerate(rngs)]
    for _ in range(steps):
        parts: list[Tensor] = []
        for stream, rng in zip(streams, rngs, strict=True):
            x = stream.__next__().x
            workload.batches.append(x)
            parts.append(x + 0.01 * torch.randn(x.shape, generator=rng["noise"]))
        workload.step_on(torch.cat(parts), keep_local)
    workload.rng = rngs[0]
    return workload


def weights(workload: TinyWorkload) -> State:
    return {name: value.clone() for name, value in state_of(workload.networks).items()}


# Against plain training --------------------------------------------------------------------------


def test_local_sgd_with_h_1_and_inner_sgd_is_large_batch_training(tmp_path: Path) -> None:
    inner = {"velocity": SGD}
    ran = run_tiny(tmp_path, tiny_config("local_sgd", inner, sites=3, h=1))
    plain = train_plainly(inner, sites=3, steps=8)
    torch.testing.assert_close(ran.state, weights(plain), rtol=1e-4, atol=1e-5)
    assert len(ran.hashes) == 1


@pytest.mark.parametrize(
    "config",
    [
        InnerConfig("adamw", lr=1e-2, clip_norm=0.1, weight_decay=0.1),
        ADAM,
        InnerConfig("sgd", lr=0.05),
    ],
    ids=lambda config: config.name,
)
def test_sync_is_large_batch_training_with_one_optimiser_everywhere(
    config: InnerConfig, tmp_path: Path
) -> None:
    inner = {"velocity": config}
    ran = run_tiny(tmp_path, tiny_config("sync", inner, sites=3, h=1))
    plain = train_plainly(inner, sites=3, steps=8)
    torch.testing.assert_close(ran.state, weights(plain), rtol=1e-3, atol=1e-4)
    assert len(ran.hashes) == 1
    states = [w.optimizers["velocity"].state_dict()["state"] for w in ran.workloads.values()]
    for index, fields in states[0].items():
        assert all(same_bits(fields, other[index]) for other in states[1:])


@pytest.mark.slow
def test_one_site_alone_ends_on_its_own_weights_and_pays_what_coding_owes_once(
    tmp_path: Path,
) -> None:
    inner = {"velocity": SGD}
    losses = []
    for up in ("fp32", "topk2", "int2"):
        config = tiny_config("local_sgd", inner, sites=1, h=2, steps=40, codec={"up": up})
        ran = run_tiny(tmp_path / up, config)
        (workload,) = ran.workloads.values()
        with torch.no_grad():
            batch = Batch(workload.batches[-1], torch.zeros(BATCH))
            losses.append(workload.evaluate(batch, 0)["fd"])
    assert max(losses[1:]) < 2 * losses[0] + 0.1


def waiting(workload: TinyWorkload, wait: Callable[[], None]) -> TinyWorkload:
    """It waits before each step."""
    plain = workload.step
    workload.step = lambda *args: (wait(), plain(*args))[1]  # type: ignore[method-assign]
    return workload


def test_a_site_that_is_late_at_the_end_of_a_run_ends_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LEAST_S", 0.05)
    rounds = {"quorum": 2, "patience_s": 30.0}
    config = tiny_config("diloco", NET, sites=3, h=2, steps=24, round=rounds)

    def part(member: Membership, workload: TinyWorkload) -> str:
        def wait() -> None:
            time.sleep(0.25 if member.name == "s3" and len(workload.batches) > 19 else 0.008)

        return take_part(member, waiting(workload, wait))

    ran = run_tiny(tmp_path, config, part=part)
    assert len(ran.hashes) == 1 and len(ran.workloads["s3"].batches) < 24


@pytest.mark.slow
def test_what_is_owed_survives_a_contribution_that_is_too_late_and_an_update_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_over, kept = Place.start_over, []

    def watched(place: Place, anew: Anew) -> None:
        start_over(place, anew)
        for index, (_, owed) in anew.unpaid.items():
            kept.append((owed, place.residuals.of(place.fragments[index])))

    monkeypatch.setattr(Place, "start_over", watched)
    monkeypatch.setattr(policy, "LEAST_S", 0.05)
    rounds = {"quorum": 2, "patience_s": 30.0}
    codec = {"up": "int2", "down": "fp32"}
    config = tiny_config("sparse_loco", NET, sites=3, h=2, steps=40, round=rounds, codec=codec)

    others: dict[str, TinyWorkload] = {}

    def part(member: Membership, workload: TinyWorkload) -> str:
        if member.name != "s3":
            others[member.name] = workload

        def wait() -> None:
            time.sleep(0.005)
            if member.name == "s3" and len(workload.batches) == 12:
                # The others are well ahead, and not at the end.
                eventually(lambda: min(len(o.batches) for o in others.values()) >= 28, 30.0)

        return take_part(member, waiting(workload, wait))

    run_tiny(tmp_path, config, part=part)
    assert kept and all(same_bits(owed, now) for owed, now in kept)
    assert any(float(value.abs().max()) > 0 for owed, _ in kept for value in owed.values())


class BusyLink(WrappedLink):
    """The coordinator has no copy for this site the first times that it asks for each."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._told: Counter[int] = Counter()

    def download(self, request: wire.DownloadRequest) -> Delivery:
        self._told[request.kind] += 1
        if request.kind != wire.DownloadRequest.UPDATE and self._told[request.kind] < 4:
            return Delivery(wire.DownloadHeader(status=wire.DownloadHeader.NOT_YET), None)
        return self._inner.download(request)


def test_a_site_that_comes_back_waits_for_its_copy_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "POLL_S", 0.02)
    config = tiny_config("sync", NET, sites=2, h=1, round={"quorum": 1, "patience_s": 30.0})
    absent, links = {"s2": Absence(1 / 4, 1 / 2)}, []

    def wrap(site: str, link: Link) -> Link:
        links.append(BusyLink(link) if site == "s2" else link)
        return links[-1]

    ran = run_tiny(tmp_path, config, absences=absent, wrap=wrap)
    assert len(ran.hashes) == 1 and ran.result.totals.rejoins == 1
    told = links[-1]._told
    assert told[wire.DownloadRequest.GLOBAL] >= 4 and told[wire.DownloadRequest.OUTER] >= 4


# What all parties end on -------------------------------------------------------------------------


def test_h_counts_steps_and_rounds_count_versions(tmp_path: Path) -> None:
    ran = run_tiny(tmp_path, tiny_config(h=4, steps=12))
    assert ran.result.model.versions == [3] and ran.result.totals.contributions == 6
    assert [(r["version"], r["site"], r["step"], r["samples"]) for r in ran.rounds()] == [
        (version, site, 4 * version, 4 * BATCH) for version in (1, 2, 3) for site in ("s1", "s2")
    ]


@pytest.mark.parametrize(("recipe", "h"), [(diloco, 2), (local_sgd, 4), (sync, 1)])
def test_batch_norm_statistics_stay_sound(recipe: ModuleType, h: int, tmp_path: Path) -> None:
    name = recipe.__name__.rpartition(".")[2]
    ran = run_tiny(tmp_path, tiny_config(name, sites=3, h=h), norm=True)
    for state in (ran.state, ran.result.model.ema):
        assert bool((state["velocity/norm.running_var"] > 0).all())
        assert int(state["velocity/norm.num_batches_tracked"]) == 8
    assert all(same_bits(weights(workload), ran.state) for workload in ran.workloads.values())


# Faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "h"), [("diloco", 2), ("sync", 1)])
def test_a_contribution_that_is_not_finite_is_refused_and_the_run_goes_on(
    name: str, h: int, tmp_path: Path
) -> None:
    ran = run_tiny(
        tmp_path,
        tiny_config(name, h=h),
        wrap=lambda name, link: PoisoningLink(link, 1) if name == "s2" else link,
    )
    totals = ran.result.totals
    assert (totals.rejected, totals.contributions) == (1, 16 // h)
    assert ran.result.model.versions == [8 // h]
    assert len(ran.hashes) == 1
    for state in (ran.state, ran.result.model.ema):
        assert all(bool(value.isfinite().all()) for value in state.values())
    (text,) = ran.events("rejected")
    assert "s2" in text and "not finite" in text and "\n" not in text


def test_a_site_whose_gradients_come_too_late_goes_on_with_the_others_weights(
    tmp_path: Path,
) -> None:
    """Weights and optimisers: it is in later rounds, and all end on the same bits."""
    rounds = {"quorum": 1, "patience_s": 2.0}
    config = tiny_config("sync", NET, sites=2, h=1, steps=20, round=rounds)
    strategy = sync.build(config)
    config.round.patience_s = 60.0  # to join takes longer on a busy machine

    class Late(WrappedLink):
        def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
            if header.version == 6:
                eventually(lambda: hub_of(self._inner).rounds.versions[0] > 6, within_s=20.0)
            return self._inner.upload(header, payload)

    def wrap(site: str, link: Link) -> Link:
        return Late(link) if site == "s2" else link

    ran = run_tiny(tmp_path, config, strategy, wrap=wrap)
    assert len(ran.hashes) == 1 and ran.result.totals.dropped == 1
    versions = [row["version"] for row in ran.rounds("s2")]
    assert versions == [version for version in range(1, 21) if version != 7]
    states = [w.optimizers["velocity"].state_dict()["state"] for w in ran.workloads.values()]
    assert all(same_bits(states[0][index], states[1][index]) for index in states[0])


def test_a_refused_contribution_leaves_the_global_weights_as_they_were(tmp_path: Path) -> None:
    """The site tries again from the same weights: only its data have moved on."""
    config = tiny_config(sites=1, steps=4)
    poisoned = run_tiny(tmp_path / "a", config, wrap=lambda _, k: PoisoningLink(k, 1))
    clean = run_tiny(tmp_path / "b", config)
    assert poisoned.rounds()[0]["norms"] == clean.rounds()[0]["norms"]
    assert len(poisoned.workloads["s1"].batches) == len(clean.workloads["s1"].batches) + 2
    assert len(poisoned.hashes) == 1


def test_a_workloads_own_error_ends_the_simulation_and_is_the_one_that_is_raised(
    tmp_path: Path,
) -> None:
    class Broken(TinyWorkload):
        def step_on(self, x: Tensor, reduce: Any) -> dict[str, Tensor]:
            if len(self.batches) > 3 and threading.current_thread().name == "s2":
                raise ZeroDivisionError("a bug in the workload")
            return super().step_on(x, reduce)

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="a bug in the workload"):
        run_tiny(tmp_path, tiny_config("sync", h=1), make=lambda: Broken(NET))
    assert time.monotonic() - began < 10


def test_a_coordinators_own_error_is_the_one_that_is_raised(tmp_path: Path) -> None:
    def broken(model: State, layout: object) -> Any:
        raise ZeroDivisionError("a bug in the strategy")

    strategy = build_strategy(diloco, NET, sites=2, h=2)._replace(server_step=broken)
    with pytest.raises(ZeroDivisionError, match="a bug in the strategy"):
        run_tiny(tmp_path, tiny_config(), strategy)


# Agreement ---------------------------------------------------------------------------------------


def test_of_two_sites_that_differ_nobody_decides_and_one_line_names_both(tmp_path: Path) -> None:
    def part(member: Membership, workload: TinyWorkload) -> None:
        take_part(member, TinyWorkload(NET, seed=2) if member.name == "s2" else workload)

    with pytest.raises((UserError, JoinRefused), match="differs from") as raised:
        run_tiny(tmp_path, tiny_config(), part=part)
    text = str(raised.value)
    assert "s1" in text and "s2" in text and "initial weights hash to" in text and "\n" not in text


def test_a_run_that_too_few_sites_come_to_stops_and_says_who_is_missing(tmp_path: Path) -> None:
    def part(member: Membership, workload: TinyWorkload) -> None:
        if member.name == "s1":
            take_part(member, workload)

    with pytest.raises((RunStopped, JoinRefused), match="1 of 2 sites are here, not s2, after 0.5"):
        run_tiny(tmp_path, tiny_config(round={"patience_s": 0.5}), part=part)


def script(member: Membership, steps: int = 0) -> None:
    network = TinyWorkload({"unet": ADAM}).networks["unet"]
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    join = {"networks": {"unet": network}, "optimizers": {"unet": optimizer}}
    with fedwan.join(**join, steps=steps) as site:
        for _ in site:
            network(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()


def test_a_script_s_own_kinds_and_steps_complete_the_run(tmp_path: Path) -> None:
    config = load_run(None, ["workload=command", "sites=2", "eval.every=0"])
    ran = fedwan.simulate(config, tmp_path, train=partial(script, steps=40))
    assert ran.model.versions == [2] and len(set(ran.site_sha256.values())) == 1


def test_a_script_s_run_is_saved_as_often_as_its_strategy_has_it_and_goes_on(
    tmp_path: Path,
) -> None:
    words = ["workload=command", "sites=2", "h=2", "eval.every=0"]
    fedwan.simulate(load_run(None, [*words, "steps=8"]), tmp_path, train=script)
    site = max(tmp_path.glob("s1/site-*.safetensors"))
    assert read_tensors_meta(site)["version"] == 4
    ran = fedwan.simulate(load_run(None, [*words, "steps=12"]), tmp_path, train=script, resume=True)
    joins = [row["text"] for row in ran.records if row.get("event") in ("join", "rejoin")]
    assert ran.model.versions == [6] and joins and all("version 4" in text for text in joins)


def test_each_site_s_script_draws_from_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(joining.torch, "initial_seed", lambda: 7)  # as where each is a process
    monkeypatch.setattr(joining, "seed_all", seeds.append)

    words = ["workload=command", "sites=2", "steps=4", "h=2", "eval.every=0"]
    fedwan.simulate(load_run(None, words), tmp_path, train=script)
    assert len(seeds) == len({*seeds}) == 2
