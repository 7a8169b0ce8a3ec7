"""The last layer of networks that make images: tanh, with a leak that keeps it alive."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["LeakyTanh", "clamp_images"]

_LEAK = 0.01


class LeakyTanh(nn.Module):
    """tanh(h) + 0.01 h, of any shape.

    Most pixels of a digit are exactly -1. A plain tanh that is pushed far below has no gradient
    left in float32, and a generator whose whole output is there never comes back: it happened in
    one start of four. Without any tanh the background stays noisy. The leak costs a hundredth of
    range: clamp samples to [-1, 1].
    """

    def forward(self, h: Tensor) -> Tensor:
        """Values that pass ±1 only slowly."""
        return h.tanh() + _LEAK * h


def clamp_images(x: Tensor) -> Tensor:
    """Generated images (batch, channels, height, width) within [-1, 1]; points as they are."""
    return x.clamp(-1, 1) if x.dim() == 4 else x
