"""The networks of pix2pix (Isola et al. 2017, section 3.2 and appendix 6.1).

A U-Net turns an image into another of the same size, and a discriminator judges patches of 70x70
pixels of input and output together. At the default sizes they are, weight for weight, the networks
of the authors' PyTorch code (`unet_256`, `basic`), 54,413,955 and 2,768,705 parameters.

With instance norm an image is normalised by itself, whatever else is in its batch: where sites have
different images, that is what batch norm bears badly (Hsieh et al. 2020, 1910.00189, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from fedwan.models.layers import drop

_SLOPE = 0.2
_WIDEST = 8  # times the first layer's channels
_NUM_DROPPED = 3
_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "instance": partial(nn.InstanceNorm2d, affine=True),
}


class UNetGenerator(nn.Module):
    """Images (batch, channels_in, size, size) -> images (batch, channels_out, size, size).

    Each of `depth` levels halves the image on the way down, and doubles it on the way up beside
    what the way down had there. `dropout` is the share of values dropped on the way up, at the
    three levels above the coarsest; `norm` is `batch` or `instance`.
    """

    def __init__(
        self,
        channels_in: int = 3,
        channels_out: int = 3,
        width: int = 64,
        depth: int = 8,
        dropout: float = 0.5,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        assert depth >= 2 and 0 <= dropout < 1
        wide = [width * min(2**level, _WIDEST) for level in range(depth)]
        self.downs = nn.ModuleList(
            _down(before, after, level, depth, norm)
            for level, (before, after) in enumerate(zip([channels_in, *wide], wide, strict=False))
        )
        self.ups = nn.ModuleList(
            _up(after if level == depth - 1 else 2 * after, before, level, norm)
            for level, (before, after) in enumerate(zip([channels_out, *wide], wide, strict=False))
        )
        self._dropout = dropout
        self._dropped = range(max(1, depth - 1 - _NUM_DROPPED), depth - 1)
        _init(self)

    def forward(self, x: Tensor, draws: torch.Generator | None = None) -> Tensor:
        """Images in [-1, 1]; dropout draws on the device of `draws`, and drops nothing without."""
        skips: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        for level in reversed(range(len(self.ups))):
            below = skips.pop()
            x = self.ups[level](below if level == len(self.ups) - 1 else torch.cat([below, x], 1))
            if draws is not None and self._dropout and level in self._dropped:
                x = drop(x, self._dropout, draws)
        return x.tanh()


class PatchDiscriminator(nn.Module):
    """Input and output, (batch, channels, size, size), -> logits (batch, 1, h, w), high for real.

    Each logit judges a patch of 70x70 pixels; h = w = size / 8 - 2. The size is at least 24.
    `channels` are those of input and output together.
    """

    def __init__(self, channels: int = 6, width: int = 64, norm: str = "batch") -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(channels, width, has_bias=True), nn.LeakyReLU(_SLOPE)]
        for factor in (1, 2, 4):
            before, after = factor * width, 2 * factor * width
            layers.append(_conv(before, after, stride=1 if factor == 4 else 2))
            layers += [_NORMS[norm](after), nn.LeakyReLU(_SLOPE)]
        self.main = nn.Sequential(*layers, _conv(8 * width, 1, stride=1, has_bias=True))
        _init(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, 1, h, w)."""
        return self.main(x)  # type: ignore[no-any-return]


def _down(before: int, after: int, level: int, depth: int, norm: str) -> nn.Sequential:
    """Half the size; neither the finest nor the coarsest level is normalised."""
    layers: list[nn.Module] = [nn.LeakyReLU(_SLOPE)] if level else []
    layers.append(_conv(before, after))
    if 0 < level < depth - 1:
        layers.append(_NORMS[norm](after))
    return nn.Sequential(*layers)


def _up(after: int, before: int, level: int, norm: str) -> nn.Sequential:
    """Twice the size."""
    up = nn.ConvTranspose2d(after, before, 4, stride=2, padding=1, bias=level == 0)
    return nn.Sequential(nn.ReLU(), up, *([_NORMS[norm](before)] if level else []))


def _conv(before: int, after: int, *, stride: int = 2, has_bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(before, after, 4, stride=stride, padding=1, bias=has_bias)


def _init(network: nn.Module) -> None:
    """Normal weights of deviation 0.02, appendix 6.2."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
