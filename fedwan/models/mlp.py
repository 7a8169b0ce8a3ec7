"""A plain multilayer perceptron, the network for points in the plane."""

from __future__ import annotations

from torch import nn

__all__ = ["mlp"]


def mlp(num_in: int, width: int, depth: int, num_out: int) -> nn.Sequential:
    """`depth` hidden layers of `width` with SiLU between; (batch, num_in) -> (batch, num_out)."""
    layers: list[nn.Module] = []
    for layer in range(depth):
        layers += [nn.Linear(num_in if layer == 0 else width, width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(width, num_out))
