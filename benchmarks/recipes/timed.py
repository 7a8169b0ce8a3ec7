"""A workload of pix2pix's size whose steps take exactly as long as they say, and train nothing.

Tensors are those of pix2pix (Isola et al. 2017): a U-Net for 256 x 256 pixels with batch norm, and
a 70 x 70 PatchGAN, 54,413,955 + 2,768,705 = 57,182,660 fp32 values at width 64. A step moves a part
of every tensor, so that in a round every value moves, and sleeps for what remains of its time: the
processor is then free for the system under test, as it is where a GPU computes. Values move by
normal noise, which of all that deltas look like compresses least.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from benchmarks.harness.stopwatch import STOPWATCH, Ungenerative, Watched
from fedwan.config import Config, InnerConfig
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizers
from fedwan.workloads.settings import require_each

NETWORKS: dict[str, NetworkKind] = {"generator": "adversarial", "discriminator": "adversarial"}

MOST_SLICES = 50
"""Steps after which every value has moved, where a round is not shorter."""
BANK = 2_500_009
"""Values of noise, which repeats only after as many: in int4 those are more than what travels in
one message, so that no compression finds the repeat; and they stay in a processor's cache."""
SMALL = 1 << 16
"""Values of a tensor below which it is not moved in parts."""
SHIFT = 1_000_003
"""Places by which another step's noise lies elsewhere in the bank."""
FORWARD_SHARE = 1 / 3
"""Of a step's time; the backward pass has the rest, layer by layer in proportion to their sizes."""


@dataclass
class Model:
    width: int = 64
    """Channels of the first layers; 64 is pix2pix."""
    step_s: float = 0.1
    """Seconds of a step."""


# The optimisers only mark the end of a step.
DEFAULTS = {"data.batch": 1, "steps": 300, "inner.*": InnerConfig(name="sgd", lr=1e-3)}


def check(config: Config) -> None:
    require_each(Model(**config.model), width=1, step_s=0)


def build(config: Config, device: torch.device | str) -> Watched:
    model = Model(**config.model)
    with seeded_init(config.seed):
        networks = {
            "generator": Layers(unet_shapes(model.width)).to(device),
            "discriminator": Layers(patchgan_shapes(model.width)).to(device),
        }
    optimizers = build_optimizers(config.inner, networks)
    STOPWATCH.nominal_s = model.step_s
    slices = min(MOST_SLICES, config.h) if config.h > 1 else MOST_SLICES
    return STOPWATCH.watch(Timed(networks, optimizers, model.step_s, slices, config.h == 1))


Shapes = list[tuple[tuple[int, ...], ...]]
"""Of each module's tensors."""


def unet_shapes(width: int) -> Shapes:
    """The U-Net of 8 levels: each halves the image, and doubles it again beside what it skipped."""
    inner = [width * min(2**level, 8) for level in range(8)]
    outer = [3, *inner[:-1]]
    shapes: Shapes = []
    for level, (wide, narrow) in enumerate(zip(inner, outer, strict=True)):
        shapes.append(((wide, narrow, 4, 4),))
        if 0 < level < 7:
            shapes.append(_batch_norm(wide))
    for level, (wide, narrow) in reversed(list(enumerate(zip(inner, outer, strict=True)))):
        skipped = wide if level == 7 else 2 * wide
        shapes.append(((skipped, narrow, 4, 4), *([(narrow,)] if level == 0 else [])))
        if level > 0:
            shapes.append(_batch_norm(narrow))
    return shapes


def patchgan_shapes(width: int) -> Shapes:
    """Five convolutions over an image and its condition, 6 channels."""
    shapes: Shapes = [((width, 6, 4, 4), (width,))]
    for factor in (1, 2, 4):
        shapes += [((2 * factor * width, factor * width, 4, 4),), _batch_norm(2 * factor * width)]
    return [*shapes, ((1, 8 * width, 4, 4), (1,))]


def _batch_norm(channels: int) -> tuple[tuple[int, ...], ...]:
    return ((channels,), (channels,))


class Layers(nn.Module):
    """Modules that hold tensors; calling them costs the time of a forward and a backward pass."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(tensors) for tensors in shapes)

    def forward(self, backward_s_per_value: float) -> Tensor:
        """A scalar whose gradient, with respect to every value, is one millionth."""
        parts = [layer(backward_s_per_value) for layer in self.layers]
        return torch.stack(parts).sum()


class _Layer(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in zip(("weight", "bias"), shapes, strict=False):
            setattr(self, name, nn.Parameter(0.02 * torch.randn(shape)))

    def forward(self, backward_s_per_value: float) -> Tensor:
        parameters = list(self.parameters())
        seconds = backward_s_per_value * sum(p.numel() for p in parameters)
        value: Tensor = _Touch.apply(seconds, *parameters)
        return value


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seconds: float, *parameters: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.shapes = [p.shape for p in parameters]
        return torch.stack([p.view(-1)[0] for p in parameters]).sum() * 1e-6

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return None, *((grad * 1e-6).expand(shape) for shape in ctx.shapes)


@dataclass
class Timed(Ungenerative):
    step_s: float
    slices: int
    exchanges_gradients: bool
    num_steps: int = 0
    bank: Tensor = field(default_factory=lambda: torch.empty(0))
    flats: list[Tensor] = field(default_factory=list)

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """Move a slice of every tensor, and let the time pass."""
        began = time.monotonic()
        with torch.no_grad():
            self._touch(rng["touch"])
        _sleep_until(began + self.step_s)
        self._reduce(reduce)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {}

    def _reduce(self, reduce: Reduce) -> None:
        """Gradients of noise, where they are exchanged."""
        if self.exchanges_gradients:
            for network in self.networks.values():
                for parameter in network.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    self._move(parameter.grad.view(-1), 0)
        reduce(list(self.networks))

    def backward(self, networks: nn.Module) -> None:
        """A step's forward and backward pass, for systems that reduce gradients meanwhile.

        Args:
            networks: what DDP made of both; called with the seconds per value of its backward pass.
        """
        began = time.monotonic()
        num_values = sum(p.numel() for p in networks.parameters())
        time.sleep(self.step_s * FORWARD_SHARE)
        loss = networks(self.step_s * (1 - FORWARD_SHARE) / num_values)
        torch.autograd.backward(loss)
        _sleep_until(began + self.step_s)

    def _touch(self, generator: torch.Generator) -> None:
        if not len(self.bank):
            self.bank = 1e-4 * torch.randn(BANK, generator=generator)
            networks = self.networks.values()
            self.flats = [p.detach().view(-1) for network in networks for p in network.parameters()]
        place, self.num_steps = self.num_steps % self.slices, self.num_steps + 1
        for index, flat in enumerate(self.flats):
            if len(flat) < SMALL:  # as a whole, once in a round: calls take time, too
                if index % self.slices == place:
                    self._move(flat, 0)
                continue
            share = -(-len(flat) // self.slices)
            self._move(flat[place * share : (place + 1) * share], place * share)

    def _move(self, part: Tensor, position: int) -> None:
        """Add the noise that a place of a tensor has at this step."""
        while len(part):
            at = (position + self.num_steps * SHIFT) % BANK
            noise = self.bank[at : at + len(part)]
            part[: len(noise)].add_(noise)
            part, position = part[len(noise) :], position + len(noise)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
