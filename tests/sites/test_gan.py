"""The GAN recipe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedwan.config import Config, DataConfig
from fedwan.rng import NamedGenerators
from fedwan.workloads.adversarial import discriminator_loss, generator_loss, r1_penalty
from sites import gan
from tests.sites.support import Run


def test_each_network_gets_the_gradient_of_its_own_loss_at_the_present_weights() -> None:
    run = Run(gan, Config(data=DataConfig(batch=8)))
    run.step(2)
    batch = run.stream.next_batch()
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
    penalty = 0.3 / 2 * r1_penalty(real, logits)
    loss_d = discriminator_loss(logits, d(g(z).detach())) + penalty
    expected_d = torch.autograd.grad(loss_d, list(d.parameters()))
    expected_g = torch.autograd.grad(generator_loss(d(g(z))), list(g.parameters()))

    run.workload.step(batch, NamedGenerators(0, "twin"), keep)
    for name, expected in (("discriminator", expected_d), ("generator", expected_g)):
        torch.testing.assert_close(tuple(seen[name]), expected, rtol=1e-4, atol=1e-7)


def test_without_penalty_the_discriminator_is_left_to_its_loss() -> None:
    plain = Run(gan, Config(data=DataConfig(batch=8), model={"gamma": 0.0}))
    penalised = Run(gan, Config(data=DataConfig(batch=8), model={"gamma": 50.0}))
    for run in (plain, penalised):
        run.step(30)
    assert float(penalised.step()["r1"]) < float(plain.step()["r1"])
