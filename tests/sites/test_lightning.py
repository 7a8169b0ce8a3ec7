"""The recipe for LightningModules: whole runs, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fedwan.simulate import Absence, SimulatedRun, SimulatedSite, simulate

from fedwan.app import load_run, load_workload
from fedwan.config import Config, DataConfig, InnerConfig, SiteConfig
from fedwan.data import open_shard
from fedwan.errors import ConfigError, UserError
from fedwan.recipes import resolve_strategy
from fedwan.state import hash_state, state_of
from fedwan.workloads.base import discloses_inputs
from fedwan.workloads.settings import networks_of, resolve_page
from sites import lightning
from strategies import diloco
from tests.sites.support import CPU, Run, equal, weights

HERE = "tests.lightning.modules"
GAN = {"module": f"{HERE}:DigitsGan", "latents": 8}
AUTOENCODER = {"module": f"{HERE}:Autoencoder"}


def config(model: dict[str, Any], **more: Any) -> Config:
    return Config(workload="lightning", sites=2, model=dict(model), **more)


def simulated(folder: Path, asked: Config, **more: Any) -> SimulatedRun:
    resolve_page(lightning, asked)
    resolve_strategy(diloco, asked, networks_of(lightning, asked))  # type: ignore[arg-type]
    sites = {
        f"s{site + 1}": SimulatedSite(
            lightning.build(asked, CPU),
            open_shard(asked.data, site, asked.sites, asked.seed),
            rebuild=lambda: lightning.build(asked, CPU),
        )
        for site in range(asked.sites)
    }
    return simulate(
        sites,
        diloco.build(asked),
        folder,
        num_steps=asked.steps,
        batch=asked.data.batch,
        ema_half_life=500.0,
        inner=asked.inner,
        **more,
    )


def test_two_sites_train_a_manual_gan_and_end_on_the_same_bits(tmp_path: Path) -> None:
    asked = config(GAN, steps=150, h=10, data=DataConfig(batch=32))
    ran = simulated(tmp_path, asked)
    assert list(asked.inner) == ["generator", "discriminator"]
    assert set(ran.site_sha256.values()) == {hash_state(ran.model.state)}
    names = {name.partition("/")[0] for name in ran.model.state}
    assert names == {"generator", "discriminator"}
    quality = [row for row in ran.records if row["kind"] == "quality"]
    assert quality[-1]["fd"] < 0.7 * quality[0]["fd"] and quality[-1]["fd_floor"] > 0
    rounds = [row for row in ran.records if row["kind"] == "round"]
    assert {"g_loss", "d_loss"} <= set(rounds[-1]["losses"])


def test_two_sites_train_an_automatic_module_of_one_network(tmp_path: Path) -> None:
    asked = config(AUTOENCODER | {"args": {"schedule": "one_cycle"}}, steps=60, h=10)
    ran = simulated(tmp_path, asked)
    assert asked.outer["model"].momentum == 0.9, "it learns by regression"
    assert set(ran.site_sha256.values()) == {hash_state(ran.model.state)}
    quality = [row for row in ran.records if row["kind"] == "quality"]
    assert quality[-1]["fd"] < quality[0]["fd"] / 2
    assert quality[-1]["fd"] == quality[-1]["val_loss"]


def test_what_an_optimiser_leaves_out_of_a_child_does_not_travel(tmp_path: Path) -> None:
    ran = simulated(tmp_path, config({"module": f"{HERE}:Probe"}, steps=20, h=10))
    assert set(ran.model.state) == {"net/2.weight", "net/2.bias"}
    assert set(ran.site_sha256.values()) == {hash_state(ran.model.state)}
    quality = [row for row in ran.records if row["kind"] == "quality"]
    assert quality[-1]["fd"] < quality[0]["fd"]


def test_a_site_that_dies_comes_back_into_the_schedule(tmp_path: Path) -> None:
    asked = config(AUTOENCODER, steps=40, h=10)
    ran = simulated(tmp_path, asked, absences={"s2": Absence(0.3, 0.6)})
    assert ran.totals.rejoins == 1
    assert set(ran.site_sha256.values()) == {hash_state(ran.model.state)}


def test_a_site_goes_on_from_its_state_bit_for_bit() -> None:
    run = Run(lightning, config(AUTOENCODER, data=DataConfig(batch=8)))
    run.step(3)
    state = run.state()
    run.step(2)
    resumed = Run(lightning, config(AUTOENCODER, data=DataConfig(batch=8)))
    resumed.load_state(state)
    resumed.workload.begin(3)  # type: ignore[attr-defined]
    resumed.step(2)
    assert equal(weights(resumed), weights(run))


def test_sites_begin_alike_and_samples_are_fixed_by_their_seed() -> None:
    first, second = (Run(lightning, config(GAN), site=site) for site in (0, 1))
    assert hash_state(state_of(first.workload.networks)) == hash_state(
        state_of(second.workload.networks)
    )
    before = torch.random.get_rng_state()
    a, b, c = (first.workload.sample(5, seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and a.shape == (5, 1, 8, 8)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.workload.fit.module.training  # type: ignore[attr-defined]
    blank = Run(lightning, config(AUTOENCODER)).workload.sample(3, seed=0)
    assert torch.equal(blank, torch.zeros(3, 1, 8, 8))


def test_resolving_twice_changes_nothing_and_clipping_is_ours() -> None:
    once = load_run(
        None,
        [
            "workload=lightning",
            f"model.module={HERE}:TakingTurns",
            "model.latents=8",
            "model.args.width=16",
            "site.accumulate=2",
            "inner.generator.clip_norm=1.5",
        ],
    )
    assert once.inner["generator"] == InnerConfig("own", clip_norm=1.5)
    assert once.inner["discriminator"] == InnerConfig("own")
    assert (once.outer["generator"].momentum, once.data.batch, once.steps) == (0.5, 32, 2000)
    twice = copy.deepcopy(once)
    resolve_page(lightning, twice)
    assert once == twice
    workload = load_workload("lightning").build(once, CPU)
    assert workload.networks["generator"][0].out_features == 16


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "model.module = '' names no class"),
        (["model.module=nowhere:Gan"], "there is no module 'nowhere'"),
        ([f"model.module={HERE}:WithoutOptimizers"], "configure_optimizers returns no optimiser"),
        ([f"model.module={HERE}:WithoutConfigure"], "defines no configure_optimizers"),
        ([f"model.module={HERE}:Classifier"], "has no sample.* and no validation_step"),
        (["model.args.deep=3"], "does not fit .*'deep'; it takes latents, width, lr"),
        (["inner.generator.lr=0.1"], "inner.generator.* has no effect: .* configures its"),
        (["inner.generatr.clip_norm=1"], "trains generator, discriminator; did you mean"),
        (["strategy=sync"], "name = 'own' does not go with strategy 'sync'"),
        (
            ["strategy=parameter_server"],
            "name = 'own' does not go with",
        ),
        (["site.recompute=true"], "site.recompute = True has no effect"),
        (["model.kind=adversary"], "model.kind = 'adversary' is none of adversarial"),
        (["site.accumulate=3"], "site.accumulate=3 does not divide the 32 samples"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_in_one_line(words: list[str], text: str) -> None:
    if words and not words[0].startswith("model.module"):
        words = [f"model.module={HERE}:DigitsGan", "model.latents=8", *words]
    with pytest.raises(ConfigError, match=text) as caught:
        load_run(None, ["workload=lightning", "sites=2", *words])
    assert len(str(caught.value).splitlines()) <= 2, "a line for each network"


def test_samples_of_another_shape_than_the_data_are_refused() -> None:
    run = Run(lightning, config(GAN, data=DataConfig("ring8")))
    with pytest.raises(UserError, match="makes samples of shape .* data.name=ring8 has"):
        run.workload.sample(3, seed=0)


def test_half_precision_and_parts_are_followed() -> None:
    asked = config(
        GAN | {"module": f"{HERE}:TakingTurns"},
        data=DataConfig(batch=8),
        site=SiteConfig("16-mixed", accumulate=2),
    )
    run = Run(lightning, asked)
    before = weights(run)
    run.step(3)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))
    assert set(run.workload.kept) == {"scale", "streak"}  # type: ignore[attr-defined]


def test_a_module_says_itself_whether_its_samples_are_made_of_data(tmp_path: Path) -> None:
    files = DataConfig("folder", path=str(tmp_path), size=8)
    model = {"module": f"{HERE}:Remembering", "latents": 8}
    asked = config(model, data=files)
    resolve_page(lightning, asked)
    assert discloses_inputs(lightning.build(asked, CPU))
    assert not discloses_inputs(Run(lightning, config(GAN)).workload)
    pairs = config(AUTOENCODER, data=DataConfig("photo_edges"))
    assert discloses_inputs(lightning.build(pairs, CPU))
