"""What the tests of all recipes share: a small run of each, and its whole state."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedwan.config import Config
from fedwan.data import Loader, open_shard
from fedwan.rng import NamedGenerators
from fedwan.workloads.base import Reduce, Workload, keep_local
from fedwan.workloads.settings import resolve_page

CPU = torch.device("cpu")


class Run:
    """One site that trains a recipe, as the engine would drive it."""

    def __init__(self, recipe: ModuleType, config: Config, site: int = 0) -> None:
        resolve_page(recipe, config)
        self.config = config
        self.workload: Workload = recipe.build(config, CPU)
        self.rng = NamedGenerators(config.seed, f"s{site + 1}")
        self.shard = open_shard(config.data, site, config.sites, config.seed)
        self.held_out = self.shard.held_out
        self.stream: Loader = self.shard.loader(config.data.batch, self.rng["data"])

    def step(self, num: int = 1, reduce: Reduce = keep_local) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for _ in range(num):
            losses = self.workload.step(next(self.stream), self.rng, reduce)
        return losses

    def state(self) -> dict[str, Any]:
        """All that a checkpoint of the site would hold."""
        return copy.deepcopy(
            {
                "networks": {n: m.state_dict() for n, m in self.workload.networks.items()},
                "optimizers": {n: o.state_dict() for n, o in self.workload.optimizers.items()},
                "rng": self.rng.state_dict(),
                "stream": self.stream.state_dict(),
            }
        )

    def load_state(self, state: dict[str, Any]) -> None:
        for name, module in self.workload.networks.items():
            module.load_state_dict(state["networks"][name])
        for name, optimizer in self.workload.optimizers.items():
            optimizer.load_state_dict(copy.deepcopy(state["optimizers"][name]))
        self.rng.load_state_dict(state["rng"])
        self.stream.load_state_dict(state["stream"])


def weights(run: Run) -> list[Tensor]:
    """A copy of every parameter."""
    modules = run.workload.networks.values()
    return [p.detach().clone() for module in modules for p in module.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """The same to the bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
