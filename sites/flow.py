"""A rectified flow (Liu et al. 2022): a velocity network, logit-normal times, Euler sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fedwan.config import Config, InnerConfig
from fedwan.data import find_source
from fedwan.metrics import NUM_DRAWS, measure_quality
from fedwan.models.bounded import clamp_images
from fedwan.models.velocity import VelocityNetwork
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizers, step_optimizers
from fedwan.workloads.rectified_flow import draw_sigma, euler_sample, interpolate
from fedwan.workloads.settings import fill_inner, fill_training, require_at_least

NETWORKS: dict[str, NetworkKind] = {"velocity": "regression"}


@dataclass
class Model:
    """Settings under `model.*`."""

    width: int = 256
    """Values of the velocity network's residual stream."""
    depth: int = 3
    """Its residual blocks."""
    euler_steps: int = 20
    """Steps from noise to a sample."""


def resolve(config: Config) -> None:
    """Fill in batch, steps and the inner optimiser; refuse what cannot be built."""
    model = Model(**config.model)
    require_at_least("model.width", model.width, 4)
    require_at_least("model.depth", model.depth, 1)
    require_at_least("model.euler_steps", model.euler_steps, 1)
    fill_training(config, batch=64, steps=4000)
    fill_inner(config, "velocity", InnerConfig(lr=5e-4, beta1=0.9, beta2=0.99))


def build(config: Config, device: torch.device | str) -> Flow:
    """The velocity network and its optimiser, the same at every site of a run."""
    model = Model(**config.model)
    shape = find_source(config.data.name).shape
    with seeded_init(config.seed):
        velocity = VelocityNetwork(shape, model.width, model.depth).to(device)
    networks = {"velocity": velocity}
    optimizers = build_optimizers(config.inner, networks)
    return Flow(networks, optimizers, config, model, torch.device(device))


@dataclass(frozen=True)
class Flow:
    """See `fedwan.workloads.base.Workload`."""

    networks: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    config: Config
    model: Model
    device: torch.device

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """One step of regression on the velocity at random noise levels."""
        noise = torch.randn(batch.x.shape, generator=rng["noise"]).to(self.device)
        sigma = draw_sigma(len(noise), rng["sigma"]).to(self.device)
        x, target = interpolate(batch.x, noise, sigma)
        loss = mse_loss(self.networks["velocity"](x, sigma), target)
        self.optimizers["velocity"].zero_grad()
        torch.autograd.backward(loss)
        reduce(("velocity",))
        step_optimizers(self.config.inner, self.networks, self.optimizers)
        return {"velocity": loss.detach()}

    def sample(self, num: int, seed: int) -> Tensor:
        """Samples from fixed noise, (num, …)."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
        shape = find_source(self.config.data.name).shape
        noise = torch.randn(num, *shape, generator=generator).to(self.device)
        return clamp_images(euler_sample(self.networks["velocity"], noise, self.model.euler_steps))

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """See `fedwan.metrics.measure_quality`."""
        generated = self.sample(NUM_DRAWS * len(real.x), derive_seed(seed, "evaluate"))
        return measure_quality(self.config.data.name, real, generated)
