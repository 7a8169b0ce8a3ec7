"""What several networks are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LEAK = 0.01
MOST_PIXELS = 1 << 22
"""Of images that are made at once where they are not trained on: 65,536 of 8x8, 64 of 256x256."""


class LeakyTanh(nn.Module):
    """tanh(h) + 0.01 h: the last layer of networks that make images.

    A plain tanh that is pushed far below -1 has no gradient left in float32, and a generator whose
    whole output is there never comes back: it happened in one start of four. Without any the
    background stays noisy. Clamp samples to [-1, 1].
    """

    def forward(self, h: Tensor) -> Tensor:
        """Values that pass ±1 only slowly."""
        return h.tanh() + _LEAK * h


def at_once(image: Sequence[int], most_pixels: int = MOST_PIXELS) -> int:
    """How many images of a shape, (…, height, width), to make or see together; 1 at least."""
    return max(1, most_pixels // math.prod(image[-2:]))


def clamp_images(x: Tensor) -> Tensor:
    """Generated images (batch, channels, height, width) within [-1, 1]; points as they are."""
    return x.clamp(-1, 1) if x.dim() == 4 else x


def drop(x: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """Dropout; torch's own draws from the global generator, which the sites of a process share."""
    kept = torch.rand(x.shape, generator=draws, device=draws.device) >= share
    return x * kept.to(x.dtype) / (1 - share)


def mlp(num_in: int, width: int, depth: int, num_out: int) -> nn.Sequential:
    """(batch, num_in) -> (batch, num_out) by `depth` hidden layers of `width` with leaky ReLU."""
    layers: list[nn.Module] = []
    for layer in range(depth):
        layers += [nn.Linear(num_in if layer == 0 else width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, num_out))
