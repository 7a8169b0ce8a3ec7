"""A recipe of a loss alone: a network that moves noise onto the data."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedwan.config import Config, InnerConfig
from fedwan.data import source_of
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.workloads.base import Batch
from fedwan.workloads.descent import Descent
from fedwan.workloads.settings import fill_inner, fill_training
from fedwan.workloads.simple import Simple

NETWORKS = {"velocity": "regression"}
SITE = (*Descent.SETTINGS, "partition=weights")


@dataclass
class Model:
    """Settings under `model.*`."""

    width: int = 32
    """Of the hidden layer."""


def resolve(config: Config) -> None:
    """Fill in batch, steps and the inner optimiser."""
    fill_training(config, batch=64, steps=100)
    fill_inner(config, "velocity", InnerConfig(lr=3e-3))


def build(config: Config, device: torch.device | str) -> Simple:
    """A straight way from noise to data, in one step."""
    (num,), width = source_of(config.data).shape, Model(**config.model).width
    with seeded_init(config.seed):
        net = nn.Sequential(nn.Linear(num, width), nn.SiLU(), nn.Linear(width, num)).to(device)

    def loss(batch: Batch, rng: NamedGenerators) -> Tensor:
        noise = torch.randn(batch.x.shape, generator=rng["noise"]).to(batch.x)
        return (net(noise) - (batch.x - noise)).square().mean()

    def sample(num_samples: int, seed: int) -> Tensor:
        noise = torch.randn(num_samples, num, generator=torch.Generator().manual_seed(seed))
        return noise.to(device) + net(noise.to(device))

    return Simple(config, "velocity", net, loss, sample)
