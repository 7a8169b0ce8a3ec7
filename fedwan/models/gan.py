"""Generators and discriminators, at 8x8 pixels small enough for one CPU core.

Images double from 4x4 to their side, and halve on the way back; channels halve and double, from
`width` at the finest level to at most 8 times as many. No normalisation of activations: the R1
penalty keeps the discriminator smooth (Mescheder et al. 2018), and no running statistics need
merging across sites. With classes, the generator is told the class by a vector beside the latents,
and the discriminator judges by projection (Miyato and Koyama 2018): w . f(x) + e(y) . f(x).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fedwan.models.layers import LeakyTanh, mlp

SIDES = (8, 16, 32, 64, 128, 256)
"""Pixels a side of images that there are networks for."""
_SLOPE = 0.2
_COARSEST = 4
_MOST_WIDTHS = 8  # channels of a level, in widths
_POINT_DEPTH = 3
_POINT_SPREAD = 4  # a dense layer is this many times as wide as an image network has channels


def build_generator(
    shape: tuple[int, ...], latents: int, width: int, num_classes: int = 0
) -> nn.Module:
    """From latents to `shape`: (channels, side, side) with a side of `SIDES`, or (dimensions,)."""
    num_in = latents * (2 if num_classes else 1)
    if len(shape) == 1:
        main = mlp(num_in, _POINT_SPREAD * width, _POINT_DEPTH, shape[0])
    else:
        main = _images_from(num_in, shape, width)
    return _Generator(main, latents, num_classes)


def build_discriminator(shape: tuple[int, ...], width: int, num_classes: int = 0) -> nn.Module:
    """A discriminator of samples of `shape`; see `build_generator`."""
    if len(shape) == 1:
        return _Discriminator(mlp(shape[0], _POINT_SPREAD * width, _POINT_DEPTH, 1), num_classes)
    return _Discriminator(_logits_of(shape, width), num_classes)


def normalize_spectra(network: nn.Module) -> nn.Module:
    """Keep every dense and convolutional layer at spectral norm 1 (Miyato et al. 2018), in place.

    The weights that travel are those before the normalisation; its vectors stay at home.
    """
    for module in list(network.modules()):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            spectral_norm(module)
    return network


class _Generator(nn.Module):
    """(latents (batch, latents), classes (batch,) or None) -> samples, images in [-1, 1]."""

    def __init__(self, main: nn.Sequential, latents: int, num_classes: int) -> None:
        super().__init__()
        self.main = main
        self.classes = nn.Embedding(num_classes, latents) if num_classes else None

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        if self.classes is not None:
            z = torch.cat([z, self.classes(y)], dim=1)
        return self.main(z)  # type: ignore[no-any-return]


class _Discriminator(nn.Module):
    """(samples, classes (batch,) or None) -> logits (batch,), high for real."""

    def __init__(self, main: nn.Sequential, num_classes: int) -> None:
        super().__init__()
        self.main = main
        last = main[-1]
        assert isinstance(last, nn.Linear)
        self.classes = nn.Embedding(num_classes, last.in_features) if num_classes else None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        features: Tensor = self.main[:-1](x)
        logits: Tensor = self.main[-1](features).squeeze(1)
        if self.classes is not None:
            logits = logits + (self.classes(y) * features).sum(dim=1)
        return logits


def _images_from(num_in: int, shape: tuple[int, ...], width: int) -> nn.Sequential:
    channels, side, _ = shape
    *finer, above = _channels(side, width)
    layers: list[nn.Module] = [nn.Linear(num_in, above * _COARSEST**2)]
    layers += [nn.Unflatten(1, (above, _COARSEST, _COARSEST)), nn.LeakyReLU(_SLOPE)]
    layers += [nn.Conv2d(above, above, 3, padding=1), nn.LeakyReLU(_SLOPE)]
    for level in reversed(finer):
        layers += [nn.Upsample(scale_factor=2), nn.Conv2d(above, level, 3, padding=1)]
        layers += [nn.LeakyReLU(_SLOPE)]
        above = level
    layers += [nn.Conv2d(width, channels, 3, padding=1), LeakyTanh()]
    return _scaled(nn.Sequential(*layers), side)


def _logits_of(shape: tuple[int, ...], width: int) -> nn.Sequential:
    above, side, _ = shape
    layers: list[nn.Module] = []
    for level in _channels(side, width):
        stride = 2 if layers else 1
        layers += [nn.Conv2d(above, level, 3, stride=stride, padding=1), nn.LeakyReLU(_SLOPE)]
        above = level
    layers += [nn.Conv2d(above, above, 3, padding=1), nn.LeakyReLU(_SLOPE), nn.Flatten()]
    return _scaled(nn.Sequential(*layers, nn.Linear(above * _COARSEST**2, 1)), side)


def _channels(side: int, width: int) -> list[int]:
    """Of each level, from the finest, `side` pixels a side, to the coarsest.

    >>> _channels(8, 24), _channels(128, 24)
    ([24, 48], [24, 48, 96, 192, 192, 192])
    """
    assert side in SIDES
    num_levels = (side // _COARSEST).bit_length()
    return [width * min(2**level, _MOST_WIDTHS) for level in range(num_levels)]


def _scaled(layers: nn.Sequential, side: int) -> nn.Sequential:
    """Draw weights anew that keep the size of signals (He et al. 2015); those of 8x8 stay as is.

    torch's own halve them in each layer: after six, all latents give the same image.
    """
    if side > min(SIDES):
        for layer in layers:
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                assert layer.bias is not None
                nn.init.kaiming_normal_(layer.weight, _SLOPE)
                nn.init.zeros_(layer.bias)
    return layers
