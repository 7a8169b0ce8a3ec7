"""A recipe with a data set of its own, by its module's name: grey squares, of any size."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedwan.config import Config
from fedwan.rng import seeded_init
from fedwan.workloads.base import Batch
from fedwan.workloads.descent import Simple

SIDE = 12
USES = ("site.*",)


class Greys(TensorDataset):
    """Squares of one grey each."""

    def __init__(self, num: int) -> None:
        greys = torch.linspace(-1, 1, num)[:, None, None, None]
        super().__init__(greys.expand(-1, 1, SIDE, SIDE), torch.zeros(num, dtype=torch.int64))

    def __getitem__(self, place: int) -> Batch:
        return Batch(*super().__getitem__(place))


def dataset(config: Config, site: str) -> tuple[Greys, Greys]:
    return Greys(64), Greys(20)


def build(config: Config, device: torch.device | str) -> Simple:
    with seeded_init(config.seed):
        net = nn.Linear(SIDE * SIDE, 1).to(device)
    return Simple(
        config,
        "net",
        net,
        loss=lambda batch, rng: net(batch.x.flatten(1)).square().mean(),
        sample=lambda num, seed: torch.zeros(num, 1, SIDE, SIDE),
    )
