"""Flow draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedwan.config import Config, InnerConfig
from fedwan.data import find_source
from fedwan.metrics import NUM_DRAWS, measure_quality
from fedwan.models.velocity import build_velocity
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizer, clip
from fedwan.workloads.rectified_flow import draw_sigma, euler_sample, interpolate

NETWORKS: dict[str, NetworkKind] = {"velocity": "regression"}


@dataclass
class Model:
    """Settings under `model.*`."""

    width: int = 256
    depth: int = 3
    euler_steps: int = 20


def resolve(config: Config) -> None:
    for network in NETWORKS:
        config.inner.setdefault(network, InnerConfig(lr=1e-3, beta2=0.99))
    config.data.batch = config.data.batch or 64
    config.steps = config.steps or 6000


def build(config: Config, device: torch.device | str) -> Flow:
    return Flow(config, device)


class Flow:
    def __init__(self, config: Config, device: torch.device | str) -> None:
        self._model = Model(**config.model)
        self._data_name = config.data.name
        self._inner = config.inner
        self._device = device
        self._shape = find_source(config.data.name).shape
        with seeded_init(config.seed):
            velocity = build_velocity(self._shape, self._model.width, self._model.depth)
        self.networks = {"velocity": velocity.to(device)}
        self.optimizers = {
            name: build_optimizer(config.inner[name], network.parameters())
            for name, network in self.networks.items()
        }

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        noise = torch.randn(batch.x.shape, generator=rng["noise"]).to(self._device)
        sigma = draw_sigma(len(batch.x), rng["sigma"]).to(self._device)
        x, target = interpolate(batch.x, noise, sigma)
        v = self.networks["velocity"]
        loss = (v(x, sigma) - target).square().mean()
        self.optimizers["velocity"].zero_grad()
        loss.backward()
        reduce(("velocity",))
        clip(v.parameters(), self._inner["velocity"].clip_norm)
        self.optimizers["velocity"].step()
        return {"velocity": loss.detach()}

    def sample(self, num: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
        noise = torch.randn(num, *self._shape, generator=generator).to(self._device)
        x = euler_sample(self.networks["velocity"], noise, self._model.euler_steps)
        return x.clamp(-1, 1) if len(self._shape) == 3 else x

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        generated = self.sample(NUM_DRAWS * len(real.x), derive_seed(seed, "evaluate"))
        return measure_quality(self._data_name, real, generated)
