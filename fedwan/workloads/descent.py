"""A completed step, from a batch to weights that have moved, as `site.*` and `inner.*` ask for it.

    in parts of the batch: losses (in half precision), gradients
    gradients that are not finite: once more, at half the loss scale
    reduce, clip each network's, step each network's optimiser

So a step that a recipe returns from is a completed one, and what had to be repeated does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedwan.config import Config
from fedwan.workloads.base import Batch, Reduce
from fedwan.workloads.half import hold_in_half
from fedwan.workloads.loss_scale import LossScale
from fedwan.workloads.moments import keep_squares_in_full
from fedwan.workloads.optim import build_optimizers, step_optimizers
from fedwan.workloads.recompute import recompute_blocks

__all__ = ["Descending", "Descent", "Others", "autocast"]

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


class Others(Protocol):
    """Processes that take each step with this one, where they share its gradients out."""

    def leaves(self, network: str) -> Sequence[Tensor]:
        """Tensors whose gradients a backward pass of one network makes."""
        ...

    def kept(self, networks: Sequence[str]) -> list[Tensor]:
        """Complete gradients, or pieces of them, that this process keeps, sharing memory."""
        ...

    def forget(self) -> None:
        """Gradients of the step are computed from the beginning, for whatever reason."""
        ...

    def collect(self, network: str) -> None:
        """A backward pass of a network is over: its gradients leave `.grad` for who keeps them."""
        ...

    def settle(self, networks: Sequence[str]) -> None:
        """All passes are over: what this process keeps, averaged over all, is in `.grad`."""
        ...

    def agree(self, is_fine: bool) -> bool:
        """Whether it is, with all processes."""
        ...

    def norm(self, network: str) -> Tensor | None:
        """Of a network's gradients at all processes together, (); None if there are none."""
        ...


class Descent:
    """Takes the steps of a workload's networks.

    Args:
        config: resolved.
        networks: that are trained, on their device; changed in place.
        twice: those whose losses hold gradients, and are differentiated again.

    Attributes:
        networks: the same.
        twice: the same.
        optimizers: the inner optimiser of each.
        others: who shares gradients out with this process; None where it keeps them.
    """

    def __init__(
        self, config: Config, networks: Mapping[str, nn.Module], twice: Collection[str] = ()
    ) -> None:
        if config.site.precision == "bf16-true":
            for network in networks.values():
                hold_in_half(network)
        self.networks = networks
        self.twice = twice
        self.optimizers = build_optimizers(config.inner, networks)
        if config.site.precision == "bf16-true":
            for optimizer in self.optimizers.values():
                keep_squares_in_full(optimizer)
        self._inner = config.inner
        self._site = config.site
        self._scale = LossScale() if config.site.precision == "16-mixed" else None
        self._weight = 1.0
        self.others: Others | None = None
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
        losses = self._compute(names, batch, backward)
        while not self._unscale(names):
            losses = self._compute(names, batch, backward)
        reduce(names)
        norm_of = None if self.others is None else self.others.norm
        networks = {name: self.networks[name] for name in names}
        step_optimizers(self._inner, networks, self.optimizers, norm_of)
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
        network, others = self.networks[name], self.others
        trained = (param for param in network.parameters() if param.requires_grad)
        params = list(trained) if others is None else others.leaves(name)
        if self._weight != 1:
            loss = _full(loss) * self._weight
        # Not `autograd.grad`: who hooks into the accumulation of gradients, as DDP does, sees this.
        torch.autograd.backward(loss, inputs=params, retain_graph=keep_graph)
        if self.others is not None:
            self.others.collect(name)

    def _unscale(self, names: Sequence[str]) -> bool:
        """Whether the gradients are finite, and then unscaled."""
        if self._scale is None:
            return True
        if self.others is None:
            params = [p for name in names for p in self.networks[name].parameters()]
            is_finite = self._scale.unscale([p.grad for p in params if p.grad is not None])
        else:
            is_finite = self.others.agree(self._scale.unscale(self.others.kept(names)))
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
        if self.others is not None:
            self.others.forget()
        for part in (Batch(*chunk) for chunk in chunks):
            with autocast(self._site.precision, batch.x.device):
                losses = backward(part)
            for name, loss in losses.items():
                share = _full(loss.detach()) / num_parts
                mean[name] = mean[name] + share if name in mean else share
        if self.others is not None:
            self.others.settle(names)
        return mean


@runtime_checkable
class Descending(Protocol):
    """A workload whose steps a `Descent` takes: what follows `site.partition` is one."""

    @property
    def descent(self) -> Descent:
        """That takes them."""
        ...


def _full(loss: Tensor) -> Tensor:
    """In fp32 at least: in fp16 a scaled loss would leave the range."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
