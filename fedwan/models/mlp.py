"""A plain multilayer perceptron, both of a GAN's networks for points in the plane."""

from __future__ import annotations

from torch import nn

__all__ = ["mlp"]


def mlp(num_in: int, width: int, depth: int, num_out: int) -> nn.Sequential:
    """(batch, num_in) -> (batch, num_out) by `depth` hidden layers of `width` with leaky ReLU."""
    layers: list[nn.Module] = []
    for layer in range(depth):
        layers += [nn.Linear(num_in if layer == 0 else width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, num_out))
