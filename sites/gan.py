"""A GAN: non-saturating loss (Goodfellow et al. 2014), R1 penalty (Mescheder et al. 2018), Adam.

Both gradients are taken at the present weights, exchanged together if the strategy exchanges
gradients, and then both networks step: simultaneous descent, the game that the R1 penalty was shown
to make converge. So one step costs one exchange. The moving average of the weights is the
coordinator's to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import Config, InnerConfig
from fedwan.data import find_source
from fedwan.metrics import NUM_DRAWS, measure_quality
from fedwan.models.bounded import clamp_images
from fedwan.models.gan import build_discriminator, build_generator
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.workloads.adversarial import (
    discriminator_loss,
    generator_loss,
    r1_penalty,
    set_gradients,
)
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizers, step_optimizers
from fedwan.workloads.settings import fill_inner, fill_training, require_at_least

NETWORKS: dict[str, NetworkKind] = {"discriminator": "adversarial", "generator": "adversarial"}


@dataclass
class Model:
    """Settings under `model.*`."""

    latents: int = 16
    """Normal values that a sample is made from."""
    width: int = 24
    """Channels of both networks' finest layer; coarser ones have twice as many."""
    gamma: float = 0.3
    """Weight of the R1 penalty: less lets the discriminator chase single samples."""


def resolve(config: Config) -> None:
    """Fill in batch, steps and inner optimisers; refuse what cannot be built."""
    model = Model(**config.model)
    require_at_least("model.latents", model.latents, 1)
    require_at_least("model.width", model.width, 1)
    require_at_least("model.gamma", model.gamma, 0)
    fill_training(config, batch=32, steps=2800)
    for network in NETWORKS:
        fill_inner(config, network, InnerConfig(lr=3e-3, beta1=0.0, beta2=0.99))


def build(config: Config, device: torch.device | str) -> Gan:
    """Both networks and their optimisers, the same at every site of a run."""
    model = Model(**config.model)
    shape = find_source(config.data.name).shape
    with seeded_init(config.seed):
        networks = {
            "discriminator": build_discriminator(shape, model.width).to(device),
            "generator": build_generator(shape, model.latents, model.width).to(device),
        }
    optimizers = build_optimizers(config.inner, networks)
    return Gan(networks, optimizers, config, model, torch.device(device))


@dataclass(frozen=True)
class Gan:
    """See `fedwan.workloads.base.Workload`."""

    networks: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    config: Config
    model: Model
    device: torch.device

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """One step of both networks, each against the other as it was before."""
        generator, discriminator = self.networks["generator"], self.networks["discriminator"]
        real = batch.x.detach().requires_grad_()
        fake = generator(self._latents(len(real), rng["latent"]))
        real_logits, fake_logits = discriminator(real), discriminator(fake)
        loss_d = discriminator_loss(real_logits, fake_logits)
        loss_g = generator_loss(fake_logits)
        penalty = r1_penalty(real, real_logits)
        set_gradients(discriminator, loss_d + self.model.gamma / 2 * penalty, keep_graph=True)
        set_gradients(generator, loss_g)
        reduce(("discriminator", "generator"))
        step_optimizers(self.config.inner, self.networks, self.optimizers)
        losses = {"discriminator": loss_d, "generator": loss_g, "r1": penalty}
        return {name: loss.detach() for name, loss in losses.items()}

    @torch.no_grad()
    def sample(self, num: int, seed: int) -> Tensor:
        """Samples from fixed latents, (num, …)."""
        latents = self._latents(num, torch.Generator().manual_seed(derive_seed(seed, "sample")))
        return clamp_images(self.networks["generator"](latents))

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """See `fedwan.metrics.measure_quality`."""
        generated = self.sample(NUM_DRAWS * len(real.x), derive_seed(seed, "evaluate"))
        return measure_quality(self.config.data.name, real, generated)

    def _latents(self, num: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num, self.model.latents, generator=generator).to(self.device)
