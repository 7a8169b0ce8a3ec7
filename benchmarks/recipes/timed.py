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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.stopwatch import STOPWATCH, Ungenerative, Watched
from fedwan.config import Config, InnerConfig
from fedwan.models.pix2pix import PatchDiscriminator, UNetGenerator
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizers

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


def build(config: Config, device: torch.device | str) -> Watched:
    model = Model(**config.model)
    with seeded_init(config.seed):
        networks = {name: net.to(device) for name, net in pix2pix_like(model.width).items()}
    optimizers = build_optimizers(config.inner, networks)
    STOPWATCH.nominal_s = model.step_s
    timed = Timed(networks, optimizers)
    timed.step_s, timed.exchanges_gradients = model.step_s, config.h == 1
    timed.slices = min(MOST_SLICES, config.h) if config.h > 1 else MOST_SLICES
    return Watched(timed)


def pix2pix_like(width: int) -> dict[str, nn.Module]:
    with torch.device("meta"):
        generator, discriminator = UNetGenerator(width=width), PatchDiscriminator(width=width)
    blocks = {"generator": [*generator.downs, *reversed(generator.ups)]}
    blocks["discriminator"] = [discriminator]
    return {name: Layers(nn.ModuleList(modules)) for name, modules in blocks.items()}


class Layers(nn.Module):
    """Modules with the tensors of others; a backward pass through them takes its time."""

    def __init__(self, others: nn.Module) -> None:
        super().__init__()
        shapes = [[p.shape for p in module.parameters(False)] for module in others.modules()]
        self.layers = nn.ModuleList(map(_Layer, filter(None, shapes)))

    def forward(self, backward_s_per_value: float) -> Tensor:
        """A scalar that depends on every value."""
        return torch.stack([layer(backward_s_per_value) for layer in self.layers]).sum()


class _Layer(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in zip(("weight", "bias"), shapes, strict=False):
            setattr(self, name, nn.Parameter(0.02 * torch.randn(shape)))

    def forward(self, backward_s_per_value: float) -> Tensor:
        parameters = list(self.parameters())
        seconds = backward_s_per_value * sum(p.numel() for p in parameters)
        value = torch.stack([p.sum() for p in parameters])
        value.register_hook(lambda _: time.sleep(seconds))
        return 1e-6 * value.sum()


class Timed(Ungenerative):
    step_s: float
    slices: int
    exchanges_gradients: bool
    num_steps = 0
    bank = torch.empty(0)

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """Move a slice of every tensor, and let the time pass."""
        began = time.monotonic()
        params = [p for network in self.networks.values() for p in network.parameters()]
        if not len(self.bank):
            self.bank = 1e-4 * torch.randn(BANK, generator=rng["touch"])
        place, self.num_steps = self.num_steps % self.slices, self.num_steps + 1
        for index, flat in enumerate(p.detach().view(-1) for p in params):
            if len(flat) >= SMALL:
                share = -(-len(flat) // self.slices)
                self._move(flat[place * share : (place + 1) * share], place * share)
            elif index % self.slices == place:  # as a whole, once in a round: calls take time, too
                self._move(flat, 0)
        _sleep_until(began + self.step_s)
        for param in params if self.exchanges_gradients else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            self._move(param.grad.view(-1), 0)
        reduce()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {}

    def backward(self, networks: nn.Module) -> None:
        """A step's forward and backward pass, for systems that reduce gradients meanwhile.

        Args:
            networks: what DDP made of both; called with the seconds per value of its backward pass.
        """
        began = time.monotonic()
        num_values = sum(p.numel() for p in networks.parameters())
        loss = networks(self.step_s * (1 - FORWARD_SHARE) / num_values)
        _sleep_until(began + self.step_s * FORWARD_SHARE)
        loss.backward()
        _sleep_until(began + self.step_s)

    def _move(self, part: Tensor, position: int) -> None:
        """Add the noise that a place of a tensor has at this step."""
        while len(part):
            at = (position + self.num_steps * SHIFT) % BANK
            noise = self.bank[at : at + len(part)]
            part[: len(noise)].add_(noise)
            part, position = part[len(noise) :], position + len(noise)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
