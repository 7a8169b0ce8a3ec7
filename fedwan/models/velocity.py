"""Velocity networks of a flow: (x, sigma) -> velocity, small enough for one CPU core.

A perceptron with residual blocks that the noise level modulates (adaLN of Peebles & Xie 2023). At
8x8 pixels a dense layer sees the whole image for the price of a convolution's few channels, and
dense products are what a CPU core does best.

The network predicts the data, and the velocity follows from it (Li & He 2025, "Back to basics"):

    v = (x_sigma - data) / max(sigma, 1/20)

Data lie near a surface of few dimensions, noise does not, so a narrow network predicts them better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from fedwan.models.bounded import LeakyTanh
from fedwan.models.dense_cuts import DenseCut

__all__ = ["NUM_LEVEL_VALUES", "VelocityNetwork", "embed_level", "velocity_towards"]

_NUM_FREQUENCIES = 32
_MIN_SIGMA = 0.05  # below it an error in the data would count for ever more in the velocity

NUM_LEVEL_VALUES = 2 * _NUM_FREQUENCIES
"""Values that `embed_level` makes of a noise level."""


def embed_level(sigma: Tensor) -> Tensor:
    """Sines and cosines of a noise level, (batch,) in [0, 1] -> (batch, 64).

    Frequencies run geometrically from half a turn to 64 turns over [0, 1].
    """
    octaves = torch.linspace(-1, 6, _NUM_FREQUENCIES, device=sigma.device, dtype=sigma.dtype)
    angles = 2 * math.pi * sigma[:, None] * torch.exp2(octaves)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def velocity_towards(data: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
    """The velocity d x / d sigma that leads to predicted data, (batch, …).

    Args:
        data: the prediction, (batch, …).
        x: samples at `sigma`, of the same shape.
        sigma: (batch,) in [0, 1].
    """
    velocity: Tensor = (x - data) / sigma.clamp(min=_MIN_SIGMA).view(-1, *[1] * (x.dim() - 1))
    return velocity


class VelocityNetwork(nn.Module):
    """Samples (batch, *shape) and noise levels (batch,) -> velocities (batch, *shape).

    Args:
        shape: of one sample: (channels, height, width) of images in [-1, 1], or (dimensions,).
        width: values of the residual stream; a multiple of 4.
        depth: residual blocks.
    """

    dense_cuts: Mapping[str, DenseCut] = MappingProxyType(
        {"modulate": "gathered", "blocks.*.first": "columns", "blocks.*.second": "rows"}
    )
    """See `fedwan.models.dense_cuts.DenseParallel`."""

    def __init__(self, shape: tuple[int, ...], width: int, depth: int) -> None:
        super().__init__()
        num_values = math.prod(shape)
        self.read = nn.Linear(num_values, width)
        self.level = nn.Sequential(nn.Linear(2 * _NUM_FREQUENCIES, width // 4), nn.SiLU())
        self.modulate = nn.Linear(width // 4, 2 * width * depth)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.write = nn.Linear(width, num_values)
        self.bound = LeakyTanh() if len(shape) == 3 else nn.Identity()
        for layer in (self.modulate, self.write):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Velocities d x / d sigma."""
        h = self.features(x, sigma)[-1]
        data = self.bound(self.write(layer_norm(h, h.shape[1:]))).view_as(x)
        return velocity_towards(data, x, sigma)

    def features(self, x: Tensor, sigma: Tensor) -> list[Tensor]:
        """What each block makes of the samples, (batch, width)."""
        h = self.read(x.flatten(1))
        modulation = self.modulate(self.level(embed_level(sigma)))
        made = []
        for block, part in zip(self.blocks, modulation.chunk(len(self.blocks), dim=1), strict=True):
            h = block(h, part)
            made.append(h)
        return made


class _Block(nn.Module):
    """x + dense(silu(dense(norm(x) * (1 + scale) + shift))), the identity at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        scale, shift = modulation.chunk(2, dim=1)
        inner = layer_norm(x, x.shape[1:]) * (1 + scale) + shift
        out: Tensor = self.second(silu(self.first(inner)))
        return x + out
