"""A recipe of a loss alone: a network that moves noise onto the data."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedwan.config import Config, InnerConfig
from fedwan.config_tree import setting, span
from fedwan.data import source_of
from fedwan.models.layers import clamp_images
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.workloads.base import Batch
from fedwan.workloads.descent import Simple

NETWORKS = {"velocity": "regression"}
USES = ("site.*",)
DEFAULTS = {"data.batch": 64, "steps": 1000, "inner.*": InnerConfig(lr=3e-3)}


@dataclass
class Model:
    """Settings under `model.*`."""

    width: int = setting(32, span(1))
    """Of the hidden layer."""


def build(config: Config, device: torch.device | str) -> Simple:
    """A straight way from noise to data, in one step."""
    shape, width = source_of(config.data).shape, Model(**config.model).width
    num = math.prod(shape)
    with seeded_init(config.seed):
        layers = [nn.Flatten(), nn.Linear(num, width), nn.SiLU(), nn.Linear(width, num)]
        net = nn.Sequential(*layers, nn.Unflatten(1, shape)).to(device)

    def loss(batch: Batch, rng: NamedGenerators) -> Tensor:
        noise = torch.randn(batch.x.shape, generator=rng["noise"]).to(batch.x)
        return (net(noise) - (batch.x - noise)).square().mean()

    def sample(num_samples: int, seed: int) -> Tensor:
        drawn = torch.Generator().manual_seed(seed)
        noise = torch.randn(num_samples, *shape, generator=drawn).to(device)
        return clamp_images(noise + net(noise))

    return Simple(config, "velocity", net, loss, sample)
