"""Generators and discriminators, small enough for one CPU core.

No normalisation layers: the R1 penalty keeps the discriminator smooth (Mescheder et al. 2018), its
samples stay independent of each other, and no running statistics need merging across sites.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedwan.models.bounded import LeakyTanh
from fedwan.models.mlp import mlp

__all__ = [
    "ImageDiscriminator",
    "ImageGenerator",
    "PointDiscriminator",
    "PointGenerator",
    "build_discriminator",
    "build_generator",
]

_SLOPE = 0.2
_POINT_DEPTH = 3
_POINT_SPREAD = 4  # a dense layer is this many times as wide as an image network has channels


def build_generator(shape: tuple[int, ...], latents: int, width: int) -> nn.Module:
    """A generator of samples of `shape`: (channels, 8, 8), or (dimensions,) for points."""
    if len(shape) == 1:
        return PointGenerator(shape[0], latents, width)
    assert shape[1:] == (8, 8)
    return ImageGenerator(shape[0], latents, width)


def build_discriminator(shape: tuple[int, ...], width: int) -> nn.Module:
    """A discriminator of samples of `shape`: (channels, 8, 8), or (dimensions,) for points."""
    if len(shape) == 1:
        return PointDiscriminator(shape[0], width)
    assert shape[1:] == (8, 8)
    return ImageDiscriminator(shape[0], width)


class ImageGenerator(nn.Module):
    """Latents (batch, latents) -> images (batch, channels, 8, 8) in [-1, 1]."""

    def __init__(self, channels: int, latents: int, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(latents, 2 * width * 4 * 4),
            nn.Unflatten(1, (2 * width, 4, 4)),
            nn.LeakyReLU(_SLOPE),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.LeakyReLU(_SLOPE),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.LeakyReLU(_SLOPE),
            nn.Conv2d(width, channels, 3, padding=1),
            LeakyTanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images in [-1, 1]."""
        images: Tensor = self.main(z)
        return images


class ImageDiscriminator(nn.Module):
    """Images (batch, channels, 8, 8) -> logits (batch,), high for real."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.LeakyReLU(_SLOPE),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.LeakyReLU(_SLOPE),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.LeakyReLU(_SLOPE),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch,)."""
        logits: Tensor = self.main(x)
        return logits.squeeze(1)


class PointGenerator(nn.Module):
    """Latents (batch, latents) -> points (batch, dimensions)."""

    def __init__(self, dimensions: int, latents: int, width: int) -> None:
        super().__init__()
        self.main = mlp(latents, _POINT_SPREAD * width, _POINT_DEPTH, dimensions)

    def forward(self, z: Tensor) -> Tensor:
        """Points, unbounded."""
        points: Tensor = self.main(z)
        return points


class PointDiscriminator(nn.Module):
    """Points (batch, dimensions) -> logits (batch,), high for real."""

    def __init__(self, dimensions: int, width: int) -> None:
        super().__init__()
        self.main = mlp(dimensions, _POINT_SPREAD * width, _POINT_DEPTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch,)."""
        logits: Tensor = self.main(x)
        return logits.squeeze(1)
