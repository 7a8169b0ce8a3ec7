"""A recipe of a loss alone: one network, and samples that real ones are compared with.

    def build(config, device):
        with seeded_init(config.seed):
            net = nn.Sequential(...).to(device)
        return Simple(config, "net", net, loss=..., sample=...)

Precision, accumulation, partition, clipping and schedules are as `site.*` and `inner.*` ask for
them, so that such a recipe's `USES` is `("site.*",)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedwan.config import Config
from fedwan.rng import NamedGenerators
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.descent import Descent, Generating

__all__ = ["Simple"]


class Simple(Generating):
    """Implements `fedwan.workloads.base.Workload` for one network and its loss.

    Args:
        config: resolved.
        name: of the network.
        network: on its device.
        loss: gets a batch, or its part, and named generators; the mean loss, ().
        sample: gets a number and a seed; samples (num, …) like `Batch.x`.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        network: nn.Module,
        loss: Callable[[Batch, NamedGenerators], Tensor],
        sample: Callable[[int, int], Tensor],
    ) -> None:
        self.descent = Descent(config, {name: network})
        self.config = config
        self._name = name
        self._loss = loss
        self._sample = sample

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """One step of descent."""

        def backward(part: Batch) -> dict[str, Tensor]:
            loss = self._loss(part, rng)
            self.descent.add_gradients(self._name, loss)
            return {self._name: loss}

        return self.descent.step((self._name,), batch, backward, reduce)

    @torch.no_grad()
    def sample(self, num: int, seed: int) -> Tensor:
        """Samples of the present weights, (num, …)."""
        return self._sample(num, seed)
