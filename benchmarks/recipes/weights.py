"""One network of so many bytes of fp32, whose step only moves each value a little."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.stopwatch import STOPWATCH, Ungenerative, Watched
from fedwan.config import Config, InnerConfig
from fedwan.rng import NamedGenerators
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizers
from fedwan.workloads.settings import require_each

NETWORKS: dict[str, NetworkKind] = {"model": "adversarial"}
NUM_TENSORS = 16


@dataclass
class Model:
    num_bytes: int = 1_000
    """Of all values."""


# The optimiser does nothing.
DEFAULTS = {"data.batch": 1, "steps": 100, "inner.*": InnerConfig(name="sgd", lr=1e-3)}


def check(config: Config) -> None:
    require_each(Model(**config.model), num_bytes=4)


def build(config: Config, device: torch.device | str) -> Watched:
    networks = {"model": Network(Model(**config.model).num_bytes // 4).to(device)}
    return STOPWATCH.watch(Weights(networks, build_optimizers(config.inner, networks)))


class Network(nn.Module):
    def __init__(self, num_values: int) -> None:
        super().__init__()
        num = NUM_TENSORS if num_values > 100_000 else 1
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(num_values // num)) for _ in range(num)
        )


class Weights(Ungenerative):
    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        for parameter in self.networks["model"].parameters():
            parameter.data.add_(1e-3)
        return {}
