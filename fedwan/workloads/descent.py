"""A completed step, from a batch to weights that have moved, as `site.*` and `inner.*` ask for it.

    in parts of the batch: losses (in half precision), gradients
    gradients that are not finite: once more, at half the loss scale
    reduce, clip each network's, step each network's optimiser

So a step that a recipe returns from is a completed one, and what had to be repeated does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fedwan.config import Config
from fedwan.site.group import local
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.half import hold_in_half
from fedwan.workloads.loss_scale import LossScale
from fedwan.workloads.moments import keep_squares_in_full
from fedwan.workloads.optim import build_optimizers, step_optimizers
from fedwan.workloads.recompute import recompute_blocks
from fedwan.workloads.sharding import Processes

__all__ = ["Descending", "Descent", "autocast"]

_HALF = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}


def autocast(precision: str, device: torch.device, **options: bool) -> AbstractContextManager[None]:
    """Operations that bear it run in half precision inside, where `site.precision` says so."""
    dtype = _HALF.get(precision)
    enabled: AbstractContextManager[None] = torch.autocast(
        device.type, dtype, enabled=dtype is not None, **options
    )
    return enabled


class Descent:
    """Takes the steps of a workload's networks.

    Args:
        config: resolved.
        networks: that are trained, on their device; changed in place.
        twice: those whose losses hold gradients, and are differentiated again.
        frozen: other networks, which never step.

    Attributes:
        networks: all of them.
        optimizers: the inner optimiser of each that is trained.
        processes: of the site, which take these steps together.
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
        self._weight = 1.0
        if config.site.recompute:
            recompute_blocks(networks.values())

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """See `fedwan.workloads.base.Keeping`."""
        return {} if self._scale is None else self._scale.state

    def step(
        self,
        names: Sequence[str],
        batch: Batch,
        backward: Callable[[Batch], dict[str, Tensor]],
        reduce: Reduce,
    ) -> dict[str, Tensor]:
        """One completed step.

        Args:
            names: of the networks that step.
            batch: whose size `site.accumulate` divides.
            backward: computes the losses of a part of the batch, hands each network's gradient
                over with `add_gradients`, and returns losses to report.
            reduce: see `fedwan.workloads.base.Reduce`; gets complete, finite gradients.

        Returns:
            The parts' mean losses, detached.

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
        gradients, and so mix two games.

        Args:
            name: of the network.
            loss: a scalar.
            keep_graph: another loss of the same graph is still to come.
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
        """See `fedwan.workloads.base.Keeping`."""
        return self.descent.kept


def _full(loss: Tensor) -> Tensor:
    """In fp32 at least: in fp16 a scaled loss would leave the range."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
