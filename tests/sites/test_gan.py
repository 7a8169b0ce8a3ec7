"""The GAN recipe, on digits and on images of other sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from fedwan.app import load_run
from fedwan.config import Config, DataConfig
from fedwan.data import held_out_of
from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.workloads.adversarial import LOSSES, gradient_penalty
from sites import gan
from tests.data.files import write_folder
from tests.sites.support import Run, refused, weights

CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"), range(40), CLASSES, side=32)


def config(folder: Path, side: int = 8, **model: Any) -> Config:
    if side == 8:
        return Config(data=DataConfig(batch=8), model={"width": 4, **model})
    files: dict[str, Any] = {"path": str(folder), "classes": ",".join(CLASSES)}
    data = DataConfig("folder", size=side, batch=4, **files)
    return Config(sites=1, data=data, model={"width": 4, **model})


def test_each_network_gets_the_gradient_of_its_own_loss_at_the_present_weights() -> None:
    run = Run(gan, Config(data=DataConfig(batch=8)))
    run.step(2)
    batch = next(run.stream)
    networks = run.workload.networks
    d, g = networks["discriminator"], networks["generator"]
    # The two losses apart, each through its own graph: nothing of G's loss may be in D's gradient.
    z = torch.randn(8, 16, generator=NamedGenerators(0, "twin")["latent"])
    real = batch.x.clone().requires_grad_()
    logits, loss = d(real), LOSSES["non_saturating"]
    penalty = 0.3 / 2 * gradient_penalty(real, logits)
    loss_d = loss.discriminator(logits, d(g(z).detach())) + penalty
    expected_d = torch.autograd.grad(loss_d, list(d.parameters()))
    loss_g = loss.generator(logits.detach(), d(g(z)))
    expected_g = torch.autograd.grad(loss_g, list(g.parameters()))

    seen = run.gradients(batch, NamedGenerators(0, "twin"))
    expected = {"discriminator": expected_d, "generator": expected_g}
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("side", "model"),
    [
        (8, {"loss": "relativistic", "gamma_fake": 0.3}),
        (16, {"conditional": True, "spectral_norm": True, "loss": "hinge", "gamma_fake": 0.1}),
        (32, {}),
    ],
    ids=str,
)
def test_every_option_trains_both_networks_at_every_side(
    side: int, model: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(gan, config(folder, side, **model))
    before = weights(run)
    losses = run.step(2)
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert {"discriminator", "generator", "r1"} <= set(losses)
    assert ("r2" in losses) is bool(model.get("gamma_fake"))
    # Some losses pull both ways alike at a bias.
    assert all(a.dim() == 1 or not a.equal(b) for a, b in zip(before, weights(run), strict=True))
    shown = run.workload.sample(6, seed=1)
    assert shown.shape[2:] == (side, side) and float(shown.abs().max()) <= 1
    monkeypatch.setattr(gan, "at_once", lambda shape: 3)  # in parts
    torch.testing.assert_close(run.workload.sample(6, seed=1), shown)
    discriminator = run.workload.networks["discriminator"]
    layers = [m for m in discriminator.modules() if parametrize.is_parametrized(m)]
    assert len(layers) == (4 + 1 if model.get("spectral_norm") else 0)


def test_networks_that_are_told_the_site_have_a_label_for_each() -> None:
    words = ["workload=gan", "sites=3", "data.labels=site", "data.split=by_label"]
    built = gan.build(load_run(None, [*words, "model.conditional=true"]), "cpu")
    for network in built.networks.values():
        assert network.classes.num_embeddings == 3  # type: ignore[union-attr]
    assert len(built.sample(7, seed=0)) == 7
    # Digits are of all sites, whose numbers have nothing to do with the held-out ones' classes.
    made = built.evaluate(held_out_of(DataConfig()), seed=0)
    assert made["fd"] > 0
    with pytest.raises(ConfigError, match="data.labels = 'site' needs model.conditional=true"):
        load_run(None, words)


def test_what_cannot_be_built_is_refused(folder: Path) -> None:
    refused(gan, config(folder, loss="hing"), r"model.loss = 'hing' is none of .*hinge")
    for side, mend in ((12, "8 or 16"), (100, "64 or 128"), (512, "256")):
        says = rf"images of 8, 16, 32, 64, 128, 256 pixels.*{side} x {side}; set data.size={mend}$"
        refused(gan, config(folder, side), says)
