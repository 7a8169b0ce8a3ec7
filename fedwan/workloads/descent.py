"""A completed step, from a batch to weights that have moved, as `site.*` and `inner.*` ask for it.

    in parts of the batch: losses (in half precision), gradients
    gradients that are not finite: once more, at half the loss scale
    reduce, clip each network's, step each network's optimiser

So a step that a recipe returns from is a completed one, and what had to be repeated does not count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import Config
from fedwan.metrics import NUM_DRAWS, measure_quality
from fedwan.rng import derive_seed
from fedwan.site.group import local
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.optim import build_optimizers, step_optimizers
from fedwan.workloads.precision import LossScale, autocast, hold_in_half, keep_squares_in_full
from fedwan.workloads.recompute import recompute_blocks
from fedwan.workloads.sharding import Processes

__all__ = ["Descending", "Descent", "Generating"]


class Descent:
    """Takes the steps of a workload's trained networks, on their device; changes them in place.

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
        if config.site.precision == "bf16-true":
            for network in networks.values():
                hold_in_half(network)
        self.networks = {**networks, **(frozen or {})}
        device = next(p.device for network in networks.values() for p in network.parameters())
        self.processes = Processes(config.site.partition, device)
        self.processes.shard(networks, twice)
        self.optimizers = build_optimizers(config.inner, networks)
        if config.site.precision == "bf16-true":
            for optimizer in self.optimizers.values():
                keep_squares_in_full(optimizer)
        self._inner = config.inner
        self._site = config.site
        self._scale = LossScale() if config.site.precision == "16-mixed" else None
        self.kept: Mapping[str, Tensor] = {} if self._scale is None else self._scale.state
        """Of the workload, in a site's checkpoint."""
        self._weight = 1.0
        if config.site.recompute:
            recompute_blocks(networks.values())

    def step(
        self,
        names: Sequence[str],
        batch: Batch,
        backward: Callable[[Batch], dict[str, Tensor]],
        reduce: Reduce,
    ) -> dict[str, Tensor]:
        """One completed step of the named networks; the parts' mean losses, detached.

        `backward` computes the losses of a part of the batch, hands each network's gradient over
        with `add_gradients`, and returns losses to report. `reduce` gets complete, finite
        gradients.

        Raises:
            FedwanError: gradients are not finite at any loss scale.
        """
        batch = self.processes.part(batch)
        losses = self._compute(names, batch, backward)
        while not self._unscale(names):
            losses = self._compute(names, batch, backward)
        reduce(names)
        networks = {name: self.networks[name] for name in names}
        step_optimizers(self._inner, networks, self.optimizers)
        return losses

    def add_gradients(self, name: str, loss: Tensor, *, keep_graph: bool = False) -> None:
        """Add the gradient of a part's loss to one network's `.grad`, and to no other network's.

        Unlike `loss.backward()`, which would also add the generator's loss to the discriminator's
        gradients, and so mix two games. With `keep_graph`, another loss of it is still to come.
        """
        params = self.processes.leaves(name, self.networks[name])
        if self._weight != 1:
            loss = _full(loss) * self._weight
        # Not `autograd.grad`: who hooks into the accumulation of gradients, as DDP does, sees this.
        torch.autograd.backward(loss, inputs=params, retain_graph=keep_graph)

    def _unscale(self, names: Sequence[str]) -> bool:
        """Whether the gradients are finite, and then unscaled."""
        if self._scale is None:
            return True
        grads = [p.grad for n in names for p in self.networks[n].parameters() if p.grad is not None]
        is_finite = self._scale.unscale([local(gradient) for gradient in grads])
        is_finite = self.processes.agree(is_finite)
        self._scale.update(is_finite)
        return is_finite

    def _compute(
        self,
        names: Sequence[str],
        batch: Batch,
        backward: Callable[[Batch], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """The gradients of a whole batch in `.grad`, part by part; its mean losses."""
        num_parts = self._site.accumulate
        self._weight = (1.0 if self._scale is None else self._scale.factor) / num_parts
        mean: dict[str, Tensor] = {}
        chunks = zip(*(tensor.chunk(num_parts) for tensor in batch), strict=True)
        for param in (p for name in names for p in self.networks[name].parameters()):
            param.grad = None
        for part in (Batch(*chunk) for chunk in chunks):
            with autocast(self._site.precision, batch.x.device):
                losses = backward(part)
            for name, loss in losses.items():
                share = _full(loss.detach()) / num_parts
                mean[name] = mean[name] + share if name in mean else share
        self.processes.settle(p for name in names for p in self.networks[name].parameters())
        return mean


class Descending:
    """What a workload has of the `Descent` that takes its steps."""

    descent: Descent

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """By name, frozen ones among them."""
        return self.descent.networks

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """By the name of the network that each steps."""
        return self.descent.optimizers

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """The loss scale, for a site's checkpoint."""
        return self.descent.kept


class Generating(Descending):
    """One whose samples are made of noise and weights alone, and compared with real ones."""

    config: Config

    @abstractmethod
    def sample(self, num: int, seed: int) -> Tensor:
        """Samples of the present weights, (num, …)."""

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """See `fedwan.metrics.measure_quality`."""
        generated = self.sample(NUM_DRAWS * len(real.x), derive_seed(seed, "evaluate"))
        return measure_quality(self.config.data.name, real, generated)


def _full(loss: Tensor) -> Tensor:
    """In fp32 at least: in fp16 a scaled loss would leave the range."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
