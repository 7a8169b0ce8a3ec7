"""Velocity networks of a flow: (x, sigma) -> velocity, small enough for one CPU core.

Both are perceptrons with residual blocks that the noise level modulates (Peebles & Xie 2023,
adaLN without the layer norm's own affine part). At 8x8 pixels a dense layer sees the whole image
for the price of a convolution's few channels, and dense products are what a CPU core does best.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Velocity", "build_velocity", "embed_level"]

_NUM_FREQUENCIES = 32


def build_velocity(shape: tuple[int, ...], width: int, depth: int) -> nn.Module:
    """A velocity network for samples of `shape`, images or points."""
    return Velocity(shape, width, depth)


def embed_level(sigma: Tensor) -> Tensor:
    """Sines and cosines of a noise level, (batch,) in [0, 1] -> (batch, 64).

    Frequencies run geometrically from half a turn to 64 turns over [0, 1].
    """
    octaves = torch.linspace(-1, 6, _NUM_FREQUENCIES, device=sigma.device, dtype=sigma.dtype)
    angles = 2 * math.pi * sigma[:, None] * torch.exp2(octaves)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class _Block(nn.Module):
    """x + gate(level) * dense(silu(dense(norm(x) * scale(level) + shift(level))))."""

    def __init__(self, width: int, expand: int = 1) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Linear(width, width * expand)
        self.second = nn.Linear(width * expand, width)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        inner = functional.layer_norm(x, (self.width,)) * (1 + scale) + shift
        out: Tensor = self.second(functional.silu(self.first(inner)))
        return x + out


class Velocity(nn.Module):
    """Samples (batch, *shape) and noise levels (batch,) -> velocities (batch, *shape)."""

    def __init__(self, shape: tuple[int, ...], width: int, depth: int) -> None:
        super().__init__()
        self.shape = shape
        self.depth = depth
        num_values = math.prod(shape)
        self.read = nn.Linear(num_values, width)
        self.level = nn.Sequential(nn.Linear(2 * _NUM_FREQUENCIES, width // 4), nn.SiLU())
        self.modulate = nn.Linear(width // 4, 2 * width * depth)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.write = nn.Linear(width, num_values)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        nn.init.zeros_(self.write.weight)
        nn.init.zeros_(self.write.bias)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Velocities d x / d sigma."""
        h = self.read(x.flatten(1))
        modulation = self.modulate(self.level(embed_level(sigma))).chunk(2 * self.depth, dim=1)
        for index, block in enumerate(self.blocks):
            h = block(h, modulation[2 * index], modulation[2 * index + 1])
        out: Tensor = self.write(functional.layer_norm(h, h.shape[1:]))
        out = out.view(-1, *self.shape); out = out.tanh() + 0.01 * out if len(self.shape) == 3 else out
        return (x - out) / sigma.view(-1, *[1] * len(self.shape)).clamp(min=0.05)
