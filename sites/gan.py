"""GAN draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import Config, InnerConfig
from fedwan.data import find_source
from fedwan.metrics import NUM_DRAWS, measure_quality
from fedwan.models.gan import build_discriminator, build_generator
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.workloads.adversarial import discriminator_loss, generator_loss, r1_penalty
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizer, clip

NETWORKS: dict[str, NetworkKind] = {
    "discriminator": "adversarial",
    "generator": "adversarial",
}


@dataclass
class Model:
    """Settings under `model.*`."""

    latents: int = 32
    width: int = 24
    gamma: float = 1.0


def resolve(config: Config) -> None:
    for network in NETWORKS:
        config.inner.setdefault(network, InnerConfig(lr=2e-4, beta1=0.0, beta2=0.99))
    config.data.batch = config.data.batch or 64
    config.steps = config.steps or 2400


def build(config: Config, device: torch.device | str) -> Gan:
    return Gan(config, device)


class Gan:
    def __init__(self, config: Config, device: torch.device | str) -> None:
        self._model = Model(**config.model)
        self._data_name = config.data.name
        self._inner = config.inner
        self._device = device
        shape = find_source(config.data.name).shape
        with seeded_init(config.seed):
            generator = build_generator(shape, self._model.latents, self._model.width)
            discriminator = build_discriminator(shape, self._model.width)
        self.networks = {
            "discriminator": discriminator.to(device),
            "generator": generator.to(device),
        }
        self.optimizers = {
            name: build_optimizer(config.inner[name], network.parameters())
            for name, network in self.networks.items()
        }

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        g, d = self.networks["generator"], self.networks["discriminator"]
        fake = g(self._latents(len(batch.x), rng["latent"]))
        real = batch.x.clone().requires_grad_()
        real_logits, fake_logits = d(real), d(fake)
        penalty = r1_penalty(real, real_logits)
        d_loss = discriminator_loss(real_logits, fake_logits)
        g_loss = generator_loss(fake_logits)
        _set_gradients(d, d_loss + self._model.gamma / 2 * penalty, retain=True)
        _set_gradients(g, g_loss)
        reduce(("discriminator", "generator"))
        for name, optimizer in self.optimizers.items():
            clip(self.networks[name].parameters(), self._inner[name].clip_norm)
            optimizer.step()
        return {"discriminator": d_loss.detach(), "generator": g_loss.detach(), "r1": penalty.detach()}

    def _latents(self, num, generator):
        return torch.randn(num, self._model.latents, generator=generator).to(self._device)

    def sample(self, num: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
        with torch.no_grad():
            x = self.networks["generator"](self._latents(num, generator))
            return x.clamp(-1, 1) if x.dim() == 4 else x

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        generated = self.sample(NUM_DRAWS * len(real.x), derive_seed(seed, "evaluate"))
        return measure_quality(self._data_name, real, generated)


def _set_gradients(network: nn.Module, loss: Tensor, retain: bool = False) -> None:
    params = list(network.parameters())
    for param, gradient in zip(params, torch.autograd.grad(loss, params, retain_graph=retain), strict=True):
        param.grad = gradient
