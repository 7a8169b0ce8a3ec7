"""When a site's steps began, and how long they computed: the same clock for every system.

Times are of the machine's monotonic clock, which all processes share. What a system makes a site
wait for inside a step (a reduction of gradients) does not count as computing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.rng import NamedGenerators
from fedwan.workloads.base import Batch, Reduce


class Stopwatch:
    def __init__(self) -> None:
        self.nominal_s: float | None = None
        """Seconds that a step counts as, where a workload fixes them; else what was measured."""
        self.began: list[float] = []
        self.computed: list[float] = []
        self.ended = 0.0
        """When this site was done; the end of the last step if not said otherwise."""

    def count(self, began: float, seconds: float) -> None:
        """A step is done that began then and computed so long."""
        self.began.append(began)
        self.computed.append(seconds if self.nominal_s is None else self.nominal_s)
        self.end()

    def end(self) -> None:
        """Training is over here, with all that belongs to it."""
        self.ended = time.monotonic()

    def result(self) -> dict[str, Any]:
        return {"began": self.began, "computed": self.computed, "ended": self.ended}


STOPWATCH = Stopwatch()
"""This process's: a process is one site, or a part of its life."""


@dataclass
class Ungenerative:
    """A workload that generates nothing; the base of those that only move values."""

    networks: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]

    def sample(self, num: int, seed: int) -> Tensor:
        return torch.zeros(num, 1, 8, 8)

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        return {"fd": 0.0, "fd_floor": 0.0}


class Watched:
    """A workload with this process's stopwatch around its steps."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        # These and no more: what else a recipe offers would be done in fedwan's runs alone.
        self.networks, self.optimizers = inner.networks, inner.optimizers
        self.sample, self.evaluate = inner.sample, inner.evaluate

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        waited = 0.0

        def timed_reduce() -> None:
            nonlocal waited
            before = time.monotonic()
            reduce()
            waited += time.monotonic() - before

        began = time.monotonic()
        losses: dict[str, Tensor] = self.inner.step(batch, rng, timed_reduce)
        STOPWATCH.count(began, time.monotonic() - began - waited)
        return losses
