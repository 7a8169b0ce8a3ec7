"""One network of so many bytes of fp32, whose step only moves each value a little."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.stopwatch import Ungenerative, Watched
from fedwan.config import Config, InnerConfig
from fedwan.rng import NamedGenerators
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizers

NETWORKS: dict[str, NetworkKind] = {"model": "adversarial"}


@dataclass
class Model:
    num_bytes: int = 1_000
    """Of all values."""


# The optimiser does nothing.
DEFAULTS = {"data.batch": 1, "steps": 100, "inner.*": InnerConfig(name="sgd", lr=1e-3)}


def build(config: Config, device: torch.device | str) -> Watched:
    num_values = Model(**config.model).num_bytes // 4
    num = 16 if num_values > 100_000 else 1
    tensors = nn.ParameterList(torch.zeros(num_values // num) for _ in range(num))
    networks = {"model": nn.ModuleDict({"weights": tensors}).to(device)}
    return Watched(Weights(networks, build_optimizers(config.inner, networks)))


class Weights(Ungenerative):
    @torch.no_grad()
    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        for parameter in self.networks["model"].parameters():
            parameter.add_(1e-3)
        return {}
