"""The pix2pix recipe."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss

from fedwan.app import load_run
from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.rng import NamedGenerators
from fedwan.simulation import simulate
from fedwan.site.group import Group
from fedwan.site.recipe import take_part
from fedwan.site.site import Membership
from fedwan.state import hash_state
from sites import pix2pix
from tests.sites.support import Run, refused

FAST = {name: InnerConfig(lr=2e-3, beta1=0.5) for name in pix2pix.NETWORKS}


def config(seed: int = 0, **model: object) -> Config:
    return Config(
        workload="pix2pix",
        seed=seed,
        sites=2,
        data=DataConfig("photo_edges", batch=8),
        inner=copy.deepcopy(FAST),
        model={"width": 4, **model},
    )


def test_each_network_gets_the_gradient_of_its_own_loss_at_the_present_weights() -> None:
    run = Run(pix2pix, config())
    run.step(2)
    batch = next(run.stream)
    networks = run.workload.networks
    d, g = networks["discriminator"], networks["generator"]

    def bce(logits: Tensor, target: float) -> Tensor:
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

    # The two losses apart, each through its own graph: nothing of G's loss may be in D's gradient.
    edges, photo = batch.x[:, :1], batch.x[:, 1:]

    def made() -> Tensor:
        return g(edges, NamedGenerators(0, "twin")["dropout"])

    beside = torch.cat([edges, made().detach()], dim=1)
    loss_d = (bce(d(batch.x), 1) + bce(d(beside), 0)) / 2
    expected_d = torch.autograd.grad(loss_d, list(d.parameters()))
    image = made()
    loss_g = bce(d(torch.cat([edges, image], dim=1)), 1) + 100 * l1_loss(image, photo)
    expected_g = torch.autograd.grad(loss_g, list(g.parameters()))

    seen = run.gradients(batch, NamedGenerators(0, "twin"))
    expected = {"discriminator": expected_d, "generator": expected_g}
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)


def test_images_are_made_with_statistics_of_their_batch_which_move_no_running_ones() -> None:
    run = Run(pix2pix, config())
    run.step(2)
    before, generator = hash_state(run.pieces()), run.workload.networks["generator"]
    generator.eval()
    first = run.workload.sample(6, 0)
    assert not generator.training and hash_state(run.pieces()) == before
    generator.train()
    with torch.no_grad():
        torch.testing.assert_close(first, generator(run.held_out.x[:6, :1]))


def test_under_instance_norm_an_image_is_made_and_judged_whatever_lies_beside_it() -> None:
    run = Run(pix2pix, config(norm="instance"))
    run.step(2)
    torch.testing.assert_close(run.workload.sample(9, seed=0)[:1], run.workload.sample(1, seed=0))
    discriminator, pairs = run.workload.networks["discriminator"], run.held_out.x
    torch.testing.assert_close(discriminator(pairs[:9])[:1], discriminator(pairs[:1]))
    assert not [name for net in run.workload.networks.values() for name, _ in net.named_buffers()]


@pytest.mark.parametrize(
    ("data", "model", "text"),
    [
        ("photo_edges", {"width": 0}, "model.width = 0 is out of range"),
        ("photo_edges", {"depth": 6}, "depth = 6 halves .* photo_edges allow; choose 5 or less"),
        ("photo_edges", {"norm": "bach"}, "= 'bach' .* did you mean 'batch'"),
        ("digits", {}, "'digits' holds no pairs .* learns from; set data.name=photo_edges"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    data: str, model: dict[str, object], text: str
) -> None:
    refused(pix2pix, Config("pix2pix", data=DataConfig(data), model=model), text)


@pytest.mark.slow
def test_sites_whose_pairs_are_their_own_train_and_show_their_pictures(tmp_path: Path) -> None:
    for number, site in enumerate(("s1", "s2")):
        (tmp_path / site).mkdir()
        for place in range(12):
            pixels = np.full((32, 64, 3), 100 * number + place, np.uint8)
            Image.fromarray(pixels).save(tmp_path / site / f"{place}.png")
    words = "workload=pix2pix data.name=pairs data.split=own sites=2 h=2 steps=2 eval.num=4"
    words += f" data.path={tmp_path}/{{site}} data.size=32 model.width=4 model.depth=2 data.batch=4"

    def train(member: Membership) -> None:
        take_part(dataclasses.replace(member, show_samples=True), Group())

    run = simulate(load_run(None, words.split()), tmp_path / "run", train=train)
    assert len(set(run.site_sha256.values())) == 1 and "fd" in run.totals.quality
