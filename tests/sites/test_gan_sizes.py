"""The GAN recipe on images of other sides than 8 pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize

from fedwan.config import Config, DataConfig
from fedwan.models.gan import build_discriminator, build_generator
from fedwan.rng import lent_generators, seeded_init
from fedwan.workloads.settings import resolve_page
from sites import gan
from tests.data.files import refused, write_folder
from tests.sites.support import CPU, Run, equal

CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"), range(40), CLASSES, side=64)


def config(folder: Path, side: int, **model: object) -> Config:
    files = {"path": str(folder), "classes": ",".join(CLASSES), "workers": 0}
    data = DataConfig("folder", size=side, batch=4, **files)  # type: ignore[arg-type]
    return Config(sites=1, data=data, model={"width": 4, **model})


@pytest.mark.parametrize("side", [16, 32, 64])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"conditional": True},
        {"spectral_norm": True, "gamma": 0.0, "loss": "hinge"},
        {"conditional": True, "spectral_norm": True, "loss": "relativistic", "gamma_fake": 0.1},
        {"n_critic": 2},
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
    [(12, "8 or 16"), (48, "32 or 64"), (100, "64 or 128"), (255, "128 or 256"), (512, "256")],
)
def test_other_sides_are_refused_with_the_nearest(side: int, mend: str, folder: Path) -> None:
    says = rf"images of 8, 16, 32, 64, 128, 256 pixels.*{side} x {side}; set data.size={mend}$"
    refused(says, lambda: resolve_page(gan, config(folder, side)))


def test_files_have_a_side_that_it_makes_unless_they_say_otherwise(folder: Path) -> None:
    asked = config(folder, 0)
    resolve_page(gan, asked)
    assert gan.build(asked, CPU).sample(2, seed=0).shape == (2, 3, 64, 64)


def test_deeper_networks_step_more_gently_unless_the_user_says_otherwise(folder: Path) -> None:
    rates = {}
    for side in (8, 16, 64):
        asked = config(folder, side)
        resolve_page(gan, asked)
        rates[side] = asked.inner["generator"].lr
    assert rates == {8: 3e-3, 16: 3e-4, 64: 3e-4}


@pytest.mark.parametrize("side", [16, 64, 256])
def test_untrained_networks_tell_latents_and_images_apart(side: int) -> None:
    with seeded_init(0):
        generator = build_generator((3, side, side), 16, 8)
        discriminator = build_discriminator((3, side, side), 8)
    with torch.no_grad(), lent_generators([]):
        torch.manual_seed(0)
        assert float(generator(torch.randn(8, 16)).std(dim=0).mean()) > 0.1
        assert float(discriminator(torch.randn(8, 3, side, side)).std()) > 0.01
