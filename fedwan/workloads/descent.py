"""A completed step, from a batch to weights that have moved, as `site.*` and `inner.*` ask for it.

    in parts of the batch: losses (in half precision), gradients
    gradients that are not finite: once more, at half the loss scale
    reduce, clip each network's, step each network's optimiser

So a step that a recipe returns from is a completed one, and what had to be repeated does not count.
A recipe of a loss alone needs no class of its own, and its `USES` is `("site.*",)`:

    def build(config, device):
        with seeded_init(config.seed):
            net = nn.Sequential(...).to(device)
        return Simple(config, "net", net, loss=..., sample=...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.app import has_own_data
from fedwan.config import Config
from fedwan.data.loader import part_of
from fedwan.errors import ConfigError, FedwanError
from fedwan.metrics import measure_quality, num_generated
from fedwan.rng import NamedGenerators, derive_seed
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.optim import build_optimizers, clip
from fedwan.workloads.precision import HALF, full_dtype, recompute_blocks
from fedwan.workloads.privacy import Privacy, trained
from fedwan.workloads.sharding import Processes

_LEAST_SCALE = 2.0**-10


class Descent(ABC):
    """The base of a workload: its networks, on their device, and how the trained ones step.

    `twice` names those whose losses hold gradients, and are differentiated again; `frozen` networks
    never step.
    """

    def __init__(
        self,
        config: Config,
        networks: Mapping[str, nn.Module],
        twice: Collection[str] = (),
        frozen: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.config, self._site = config, config.site
        self.networks = {**networks, **(frozen or {})}
        self.device = next(p.device for net in networks.values() for p in net.parameters())
        self.processes = Processes(config.site.partition, self.device)
        self.processes.shard(networks, twice)
        self.optimizers = build_optimizers(config.inner, networks)
        is_fp16 = config.site.precision == "16-mixed"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=is_fp16)
        """Of losses; for a site's checkpoint."""
        self.privacy: Privacy | None = None
        """Of a site whose samples are private, set before the first step."""
        if config.site.recompute:
            recompute_blocks(networks.values())

    @abstractmethod
    def backward(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        """Losses to report of a part of a batch, whose gradients `add_gradients` has been given."""

    @abstractmethod
    def sample(self, num: int, seed: int) -> Tensor:
        """Samples of the present weights, (num, …) like `Batch.x`."""

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """One completed step of all trained networks, each against the others as they were.

        `batch` is this process's part of the site's.
        `reduce` gets complete, finite gradients; a `FedwanError` where they are so at no scale.
        """
        losses = self._compute(batch, rng)
        while not self._unscale():
            losses = self._compute(batch, rng)
        reduce()
        for name, optimizer in self.optimizers.items():
            clip(self.networks[name].parameters(), self.config.inner[name].clip_norm)
            optimizer.step()
        return losses

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """See `fedwan.metrics.measure_quality`; of samples that are made of noise and weights.

        A bare tensor is taken for a `Batch`'s `x`; a `ConfigError` if `real` is neither.
        """
        if isinstance(real, Tensor):
            real = Batch(real, torch.zeros(len(real), dtype=torch.int64))
        if not isinstance(real, Batch):
            raise ConfigError(
                f"held-out samples of workload {self.config.workload!r} come as a "
                f"{type(real).__name__}; give tensors, or a fedwan.data.Batch of x and y each, or "
                "give the workload an `evaluate` of its own"
            )
        labels = self._labels(real)
        with self.autocast():
            made = _full(self.sample_like(labels, derive_seed(seed, "evaluate")))
        figures = measure_quality(self._measured, real, made, self.config.eval.features)
        return figures | self.measure_told(labels, made)

    def measure_told(self, labels: Tensor, made: Tensor) -> dict[str, float]:
        """How well samples are what they were told to be; nothing, of most recipes."""
        return {}

    def autocast(self) -> torch.autocast:
        """What `site.precision` has steps and samples computed in."""
        half = HALF.get(self._site.precision)
        return torch.autocast(self.device.type, half, enabled=half is not None)

    @cached_property
    def _measured(self) -> str:
        """The data set that samples are measured beside; '' of a recipe's own `dataset`."""
        return "" if has_own_data(self.config) else self.config.data.name

    def sample_like(self, labels: Tensor, seed: int) -> Tensor:
        """As `sample`, of these labels, (num,) int64, by networks that are told any."""
        return self.sample(len(labels), seed)

    def _labels(self, real: Batch) -> Tensor:
        """Of the samples that quality is measured on, (num,): those of held-out ones, in turn.

        Of common data nobody's number is known, where sites are told: as many of each.
        """
        data = self.config.data
        turns = torch.arange(num_generated(self._measured, len(real.x)))
        if data.labels == "site" and data.split != "own":
            return turns % self.config.num_sites
        return real.y[turns % len(real.y)]

    def add_gradients(self, name: str, loss: Tensor, *, keep_graph: bool = False) -> None:
        """Add the gradient of a part's loss to one network's `.grad`, and to no other network's.

        Unlike `loss.backward()`, which would also add the generator's loss to the discriminator's
        gradients, and so mix two games. With `keep_graph`, another loss of it is still to come.
        """
        params = self.processes.leaves(name, self.networks[name])
        loss = self.scaler.scale(_full(loss) * (1 / self._site.accumulate))
        # Not `autograd.grad`: who hooks into the accumulation of gradients, as DDP does, sees this.
        torch.autograd.backward(loss, inputs=params, retain_graph=keep_graph)

    def add_private_gradients(
        self, name: str, loss: Callable[[Batch], Tensor], batch: Batch
    ) -> None:
        """As `add_gradients`, of a loss of single samples: their mean's, clipped and noised.

        `loss` gets batches of one. What else leaves the site must not depend on the batch.
        """
        assert self.privacy is not None
        network = self.networks[name]
        noised = self.privacy.gradients(network, loss, batch)
        for param, gradient in zip(trained(network), noised, strict=True):
            param.grad = gradient if param.grad is None else param.grad + gradient

    def _unscale(self) -> bool:
        """Whether all gradients are finite, and then unscaled."""
        if not self.scaler.is_enabled():
            return True
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        scale = self.scaler.get_scale()
        if scale < _LEAST_SCALE:
            raise FedwanError(
                "gradients in fp16 are not finite at any loss scale; set site.precision=bf16-mixed "
                "or lower the learning rates (inner.NETWORK.lr, outer.NETWORK.lr)"
            )
        return scale >= before

    def _compute(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        """The gradients of a whole batch in `.grad`, part by part; its mean losses."""
        num_parts = self._site.accumulate
        params = [p for name in self.optimizers for p in self.networks[name].parameters()]
        mean: dict[str, Tensor] = {}
        for param in params:
            param.grad = None
        for index in range(num_parts):
            with self.autocast():
                losses = self.backward(part_of(batch, num_parts, index), rng)
            for name, loss in losses.items():
                share = _full(loss.detach()) / num_parts
                mean[name] = mean[name] + share if name in mean else share
        self.processes.settle(params)
        return mean


def _full(value: Tensor) -> Tensor:
    """In fp32 at least: in fp16 a scaled loss would leave the range."""
    return value.to(full_dtype(value.dtype)) if value.is_floating_point() else value


class Simple(Descent):
    """A workload of one network, on its device, and its loss.

    `loss` gets a batch, as its data set makes it, or its part, and named generators, and gives the
    mean loss, (); `sample` gets a number and a seed, and gives samples (num, …) like `Batch.x`.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        network: nn.Module,
        loss: Callable[[Batch, NamedGenerators], Tensor],
        sample: Callable[[int, int], Tensor],
    ) -> None:
        super().__init__(config, {name: network})
        self._name, self._loss, self._sample = name, loss, sample

    def backward(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        """See `Descent`; no loss to report where it would tell of private samples."""
        if self.privacy is not None:
            self.add_private_gradients(self._name, lambda one: self._loss(one, rng), batch)
            return {}
        loss = self._loss(batch, rng)
        self.add_gradients(self._name, loss)
        return {self._name: loss}

    @torch.no_grad()
    def sample(self, num: int, seed: int) -> Tensor:
        """See `Descent`."""
        with self.autocast():
            return _full(self._sample(num, seed))
