"""The GAN recipe, on digits and on images of other sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fedwan.app import load_run
from fedwan.config import Config, DataConfig
from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.workloads.adversarial import LOSSES, gradient_penalty
from fedwan.workloads.settings import resolve_page
from sites import gan
from tests.data.files import refused, write_folder
from tests.sites.support import Run, equal


def test_each_network_gets_the_gradient_of_its_own_loss_at_the_present_weights() -> None:
    run = Run(gan, Config(data=DataConfig(batch=8)))
    run.step(2)
    batch = next(run.stream)
    networks = run.workload.networks
    d, g = networks["discriminator"], networks["generator"]
    seen: dict[str, list[Tensor]] = {}

    def keep(names: Sequence[str]) -> None:
        for name in names:
            params = networks[name].parameters()
            seen[name] = [p.grad.clone() for p in params if p.grad is not None]

    # The two losses apart, each through its own graph: nothing of G's loss may be in D's gradient.
    z = torch.randn(8, 16, generator=NamedGenerators(0, "twin")["latent"])
    real = batch.x.clone().requires_grad_()
    logits = d(real)
    penalty = 0.3 / 2 * gradient_penalty(real, logits)
    loss = LOSSES["non_saturating"]
    loss_d = loss.discriminator(logits, d(g(z).detach())) + penalty
    expected_d = torch.autograd.grad(loss_d, list(d.parameters()))
    expected_g = torch.autograd.grad(loss.generator(logits, d(g(z))), list(g.parameters()))

    run.workload.step(batch, NamedGenerators(0, "twin"), keep)
    for name, expected in (("discriminator", expected_d), ("generator", expected_g)):
        torch.testing.assert_close(tuple(seen[name]), expected, rtol=1e-4, atol=1e-7)


def gan_of(batch: int = 8, **model: object) -> Run:
    return Run(gan, Config(data=DataConfig(batch=batch), model=dict(model)))


@pytest.mark.parametrize(
    "model",
    [
        {"loss": "hinge"},
        {"loss": "relativistic", "gamma_fake": 0.3},
        {"spectral_norm": True, "gamma": 0.0},
        {"n_critic": 2, "gamma_fake": 0.1},
        {"conditional": True},
        {"conditional": True, "spectral_norm": True, "n_critic": 4, "loss": "hinge"},
    ],
    ids=str,
)
def test_every_option_trains_both_networks(model: dict[str, object]) -> None:
    run = gan_of(**model)
    networks = run.workload.networks.values()
    before = [[p.detach().clone() for p in network.parameters()] for network in networks]
    losses = run.step(3)
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert {"discriminator", "generator", "r1"} <= set(losses)
    assert ("r2" in losses) is bool(model.get("gamma_fake"))
    for first, network in zip(before, networks, strict=True):
        assert not equal(first, list(network.parameters()))
    assert run.workload.sample(20, seed=1).shape == (20, 1, 8, 8)


def test_the_discriminator_steps_alone_before_both() -> None:
    run = gan_of(n_critic=2)
    reduced: list[tuple[str, ...]] = []
    networks = run.workload.networks
    generator = networks["generator"]
    first = [p.detach().clone() for p in generator.parameters()]

    def note(names: Sequence[str]) -> None:
        reduced.append(tuple(names))
        if names == ("discriminator",):
            assert all(p.grad is None for p in generator.parameters())
            assert equal(first, list(generator.parameters()))

    run.step(reduce=note)
    assert reduced == [("discriminator",), ("discriminator", "generator")]


def test_a_batch_that_the_critic_s_steps_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.batch=8 .* model.n_critic=3 .* data.batch=9"):
        gan_of(n_critic=3)
    with pytest.raises(ConfigError, match=r"model.loss = 'hing' is none of .*hinge"):
        gan_of(loss="hing")


def test_networks_that_are_told_the_site_have_a_label_for_each() -> None:
    words = ["workload=gan", "sites=3", "data.labels=site", "data.split=by_label"]
    config = load_run(None, [*words, "model.conditional=true"])
    networks = gan.build(config, "cpu").networks
    for network in networks.values():
        assert network.classes.num_embeddings == 3
    assert len(gan.build(config, "cpu").sample(7, seed=0)) == 7
    with pytest.raises(ConfigError, match="data.labels = 'site' needs model.conditional=true"):
        load_run(None, words)


# Other sides -------------------------------------------------------------------------------------

CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"), range(40), CLASSES, side=64)


def config(folder: Path, side: int, **model: object) -> Config:
    files = {"path": str(folder), "classes": ",".join(CLASSES), "workers": 0}
    data = DataConfig("folder", size=side, batch=4, **files)  # type: ignore[arg-type]
    return Config(sites=1, data=data, model={"width": 4, **model})


@pytest.mark.parametrize("side", [16, 64])
@pytest.mark.parametrize(
    "model",
    [
        {"n_critic": 2},
        {"conditional": True, "spectral_norm": True, "loss": "relativistic", "gamma_fake": 0.1},
    ],
    ids=str,
)
def test_every_option_trains_both_networks_at_every_side(
    side: int, model: dict[str, object], folder: Path
) -> None:
    run = Run(gan, config(folder, side, **model))
    networks = run.workload.networks.values()
    before = [[p.detach().clone() for p in network.parameters()] for network in networks]
    losses = run.step(2)
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert ("r2" in losses) is bool(model.get("gamma_fake"))
    for first, network in zip(before, networks, strict=True):
        assert not equal(first, list(network.parameters()))
    shown = run.workload.sample(6, seed=1)
    assert shown.shape == (6, 3, side, side) and float(shown.abs().max()) <= 1
    discriminator = run.workload.networks["discriminator"]
    layers = [m for m in discriminator.modules() if parametrize.is_parametrized(m)]
    num_levels = (side // 4).bit_length()
    assert len(layers) == (num_levels + 2 if model.get("spectral_norm") else 0)


def test_samples_made_in_parts_are_those_of_one_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(gan, config(folder, 16, conditional=True))
    whole = run.workload.sample(7, seed=3)
    monkeypatch.setattr(gan, "_MOST_PIXELS", 3 * 16 * 16)
    torch.testing.assert_close(run.workload.sample(7, seed=3), whole)


@pytest.mark.parametrize(
    ("side", "mend"),
    [(12, "8 or 16"), (100, "64 or 128"), (512, "256")],
)
def test_other_sides_are_refused_with_the_nearest(side: int, mend: str, folder: Path) -> None:
    says = rf"images of 8, 16, 32, 64, 128, 256 pixels.*{side} x {side}; set data.size={mend}$"
    refused(says, lambda: resolve_page(gan, config(folder, side)))
