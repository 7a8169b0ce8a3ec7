"""Features of photographs: a small convolutional network with random weights, always the same ones.

Random features favour no data set, which is what Naeem et al. 2020 (2002.09797) use them for. They
need neither labels nor training, and see images of any size; figures taken through them compare
with each other alone, not with published ones.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from fedwan.metrics.threads import one_thread
from fedwan.rng import derive_seed, seeded_init

__all__ = ["NUM_FEATURES", "see_images"]

_WIDTHS = (16, 16, 32)
_CHANNELS = 3
_SLOPE = 0.2  # a unit that is silent for real images would not notice others
_CHUNK = 64
NUM_FEATURES = sum(_WIDTHS)


@torch.no_grad()
def see_images(images: Tensor) -> Tensor:
    """Mean response of each filter, (N, NUM_FEATURES), to images (N, 3, height, width), CPU."""
    parts: list[Tensor] = []
    with one_thread():
        for chunk in torch.split(images.detach(), _CHUNK):
            x, means = chunk.to("cpu", torch.float32), []
            for layer in _layers():
                x = layer(x)
                means.append(x.mean(dim=(2, 3)))
            parts.append(torch.cat(means, dim=1))
    return torch.cat(parts)


@cache
def _layers() -> tuple[nn.Module, ...]:
    with seeded_init(derive_seed("random features")):
        widths = zip((_CHANNELS, *_WIDTHS), _WIDTHS, strict=False)
        return tuple(
            _layer(before, after, stride=1 if index == 0 else 2)
            for index, (before, after) in enumerate(widths)
        )


def _layer(before: int, after: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(convolution.weight, _SLOPE)
    return nn.Sequential(convolution, nn.LeakyReLU(_SLOPE)).requires_grad_(False)
