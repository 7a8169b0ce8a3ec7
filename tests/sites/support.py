"""What the tests of all recipes share: a small run of each, and its whole state."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan.config import Config
from fedwan.data import Loader, open_shard
from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.site.replica import Replica
from fedwan.state import State, clone
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.descent import Descent
from fedwan.workloads.settings import resolve_page
from tests.support import keep_local

CPU = torch.device("cpu")
MLP = {"width": 16, "depth": 2, "euler_steps": 6}
DIT = {"network": "dit", "width": 16, "depth": 2, "heads": 2, "patch": 4, "euler_steps": 6}


class Run:
    """One site that trains a recipe, as the engine would drive it."""

    def __init__(self, recipe: ModuleType, config: Config, site: int = 0) -> None:
        resolve_page(recipe, config)
        self.config = config
        self.workload: Descent = recipe.build(config, CPU)
        self.replica = Replica(self.workload.networks, self.workload.optimizers)
        self.rng = NamedGenerators(config.seed, f"s{site + 1}")
        self.shard = open_shard(config.data, site, config.sites, config.seed)
        self.held_out = self.shard.held_out
        self.stream: Loader = self.shard.loader(config.data.batch, self.rng["data"])

    def step(self, num: int = 1, reduce: Reduce = keep_local) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for _ in range(num):
            losses = self.workload.step(next(self.stream), self.rng, reduce)
        return losses

    def gradients(self, batch: Batch, rng: NamedGenerators) -> dict[str, tuple[Tensor, ...]]:
        """That a step's optimisers get, by network."""
        seen: dict[str, tuple[Tensor, ...]] = {}

        def keep() -> None:
            for name in self.workload.optimizers:
                grads = [p.grad for p in self.workload.networks[name].parameters()]
                seen[name] = tuple(grad.clone() for grad in grads if grad is not None)

        self.workload.step(batch, rng, keep)
        return seen

    def pieces(self) -> State:
        """A copy of all tensors of the networks that are not frozen, what never travels too."""
        return clone(self.replica.pieces())

    def state(self) -> tuple[Any, ...]:
        """All that a checkpoint of the site would hold."""
        moments = clone(self.replica.inner.state())
        return self.pieces(), moments, self.rng.state_dict(), self.stream.state_dict()

    def load_state(self, state: tuple[Any, ...]) -> None:
        pieces, moments, rng, stream = state
        self.replica.load_pieces(pieces, with_model=True)
        self.replica.load_optimizers(moments)
        self.rng.load_state_dict(rng)
        self.stream.load_state_dict(stream)


def weights(run: Run) -> list[Tensor]:
    """A copy of every parameter that is trained."""
    networks = run.workload.networks
    return [p.detach().clone() for n in run.workload.optimizers for p in networks[n].parameters()]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """The same to the bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def refused(recipe: ModuleType, config: Config, match: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match=match) as caught:
        resolve_page(recipe, config)
    assert "\n" not in str(caught.value)
