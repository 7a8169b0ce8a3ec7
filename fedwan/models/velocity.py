"""Velocity networks of flows: a perceptron, small enough for one CPU core, and a transformer.

Both predict the data, and the velocity follows from it (Li & He 2025, "Back to basics"):

    v = (x_sigma - data) / max(sigma, 1/20)

Data lie near a surface of few dimensions, noise does not, so a narrow network predicts them better.
Not diffusers' `DiTTransformer2DModel`: it drops labels by torch's global generator, embeds times
and labels anew in every block, which sites would have to send, and has no zero gates at first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import layer_norm, silu

from fedwan.models.layers import LeakyTanh

_NUM_FREQUENCIES = 32
_MIN_SIGMA = 0.05  # below it an error in the data would count for ever more in the velocity
_MLP_RATIO = 4
_LONGEST = 10_000  # positions per turn of the slowest wave, over 2 pi


class VelocitySizes(NamedTuple):
    """Of `network` `mlp`, or `dit`, which is told the class and has patches and heads."""

    network: str
    width: int
    depth: int
    patch: int
    heads: int


def build_velocity(
    shape: tuple[int, ...], num_classes: int, sizes: VelocitySizes
) -> VelocityNetwork | DiffusionTransformer:
    """A network for samples of `shape`, with initial weights from torch's global generator."""
    if sizes.network == "dit":
        return DiffusionTransformer(shape, num_classes, sizes)
    assert sizes.network == "mlp"
    return VelocityNetwork(shape, sizes.width, sizes.depth)


def embed_level(sigma: Tensor) -> Tensor:
    """Sines and cosines of noise levels in [0, 1], (batch,) -> (batch, 64), half a turn to 64."""
    octaves = torch.linspace(-1, 6, _NUM_FREQUENCIES, device=sigma.device, dtype=sigma.dtype)
    angles = 2 * math.pi * sigma[:, None] * torch.exp2(octaves)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _velocity_towards(data: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
    return (x - data) / sigma.clamp(min=_MIN_SIGMA).view(-1, *[1] * (x.dim() - 1))


class VelocityNetwork(nn.Module):
    """Samples (batch, *shape) and noise levels (batch,) -> velocities (batch, *shape).

    Residual blocks that the noise level modulates. `shape` is (channels, height, width) of images
    in [-1, 1], or (dimensions,); the width is a multiple of 4.
    """

    def __init__(self, shape: tuple[int, ...], width: int, depth: int) -> None:
        super().__init__()
        num_values = math.prod(shape)
        self.read = nn.Linear(num_values, width)
        self.level = nn.Sequential(nn.Linear(2 * _NUM_FREQUENCIES, width // 4), nn.SiLU())
        self.modulate = nn.Linear(width // 4, 2 * width * depth)
        self.blocks = nn.ModuleList(_DenseBlock(width) for _ in range(depth))
        self.write = nn.Linear(width, num_values)
        self.bound = LeakyTanh() if len(shape) == 3 else nn.Identity()
        for layer in (self.modulate, self.write):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Velocities d x / d sigma."""
        h = self.features(x, sigma)[-1]
        data = self.bound(self.write(layer_norm(h, h.shape[1:]))).view_as(x)
        return _velocity_towards(data, x, sigma)

    def features(self, x: Tensor, sigma: Tensor) -> list[Tensor]:
        """What each block makes of the samples, (batch, width)."""
        h = self.read(x.flatten(1))
        modulation = self.modulate(self.level(embed_level(sigma)))
        made = []
        for block, part in zip(self.blocks, modulation.chunk(len(self.blocks), dim=1), strict=True):
            h = block(h, part)
            made.append(h)
        return made


class _DenseBlock(nn.Module):
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
        return x + self.second(silu(self.first(inner)))  # type: ignore[no-any-return]


def embed_positions(rows: int, columns: int, width: int) -> Tensor:
    """Sines and cosines of a grid's rows and columns, cell by cell: (rows * columns, width)."""
    frequencies = _LONGEST ** -(torch.arange(width // 4) / (width // 4))
    row = torch.arange(rows).repeat_interleave(columns)[:, None] * frequencies
    column = torch.arange(columns).repeat(rows)[:, None] * frequencies
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=1)


class DiffusionTransformer(nn.Module):
    """Images (batch, *shape), noise levels (batch,), labels (batch,) -> velocities (batch, *shape).

    Peebles & Xie 2023: patches as tokens, classes by adaLN-zero. Sides of images in [-1, 1] are
    multiples of `patch`, the width of 4 and of `heads`; labels are 0 … num_classes, the last for
    none.
    """

    positions: Tensor

    def __init__(self, shape: tuple[int, ...], num_classes: int, sizes: VelocitySizes) -> None:
        super().__init__()
        _, width, depth, patch, heads = sizes
        channels, rows, columns = shape
        self.patch = patch
        self.read = _linear(channels * patch**2, width)
        levels = _linear(2 * _NUM_FREQUENCIES, width, std=0.02)
        self.level = nn.Sequential(levels, nn.SiLU(), _linear(width, width, std=0.02))
        self.label = nn.Embedding(num_classes + 1, width)
        nn.init.normal_(self.label.weight, std=0.02)
        self.blocks = nn.ModuleList(_AttentionBlock(width, heads) for _ in range(depth))
        self.modulate = _linear(width, 2 * width, std=0)
        self.write = _linear(width, channels * patch**2, std=0)
        self.bound = LeakyTanh()
        # Not persistent: it is known everywhere, and so it never travels.
        positions = embed_positions(rows // patch, columns // patch, width)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """Velocities d x / d sigma."""
        patches = F.pixel_unshuffle(x, self.patch)
        condition = self._condition(sigma, labels)
        tokens = self._blocks(patches, condition)[-1]
        shift, scale = self.modulate(condition)[:, None].chunk(2, dim=2)
        written = self.write(_modulate(tokens, shift, scale)).transpose(1, 2).reshape(patches.shape)
        return _velocity_towards(self.bound(F.pixel_shuffle(written, self.patch)), x, sigma)

    def features(self, x: Tensor, sigma: Tensor, labels: Tensor) -> list[Tensor]:
        """What each block makes of the samples, (batch, tokens, width)."""
        return self._blocks(F.pixel_unshuffle(x, self.patch), self._condition(sigma, labels))

    def _condition(self, sigma: Tensor, labels: Tensor) -> Tensor:
        return silu(self.level(embed_level(sigma)) + self.label(labels))

    def _blocks(self, patches: Tensor, condition: Tensor) -> list[Tensor]:
        # (batch, values of a patch, rows, columns) -> (batch, tokens, width)
        tokens = self.read(patches.flatten(2).transpose(1, 2)) + self.positions
        made = []
        for block in self.blocks:
            tokens = block(tokens, condition)
            made.append(tokens)
        return made


class _AttentionBlock(nn.Module):
    """Attention and a perceptron, shifted, scaled and gated by the condition, first by 0."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.modulate = _linear(width, 6 * width, std=0)
        self.qkv = _linear(width, 3 * width)
        self.merge = _linear(width, width)
        self.first = _linear(width, _MLP_RATIO * width)
        self.second = _linear(_MLP_RATIO * width, width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, *rest = self.modulate(condition)[:, None].chunk(6, dim=2)
        tokens = tokens + gate * self._attention(_modulate(tokens, shift, scale))
        shift, scale, gate = rest
        hidden = F.gelu(self.first(_modulate(tokens, shift, scale)), approximate="tanh")
        return tokens + gate * self.second(hidden)  # type: ignore[no-any-return]

    def _attention(self, tokens: Tensor) -> Tensor:
        # (batch, tokens, heads * 3 * head) -> three of (batch, heads, tokens, head)
        split = self.qkv(tokens).unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(*split.unbind(0))
        return self.merge(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _modulate(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return layer_norm(tokens, tokens.shape[2:], eps=1e-6) * (1 + scale) + shift


def _linear(num_in: int, num_out: int, std: float | None = None) -> nn.Linear:
    """A dense layer with the paper's initial weights: Xavier's or normal ones, no bias at first."""
    layer = nn.Linear(num_in, num_out)
    if std is None:
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer
