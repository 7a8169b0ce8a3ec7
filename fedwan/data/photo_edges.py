"""Edges and the photographs that they are of: pairs for translating images (Isola et al. 2017).

Five colour photographs that come with scikit-image, made smaller and cut into crops of 32x32
pixels. The input is the strength of the crop's edges (Sobel), the target is the crop.

Of each photograph's blocks of 64x64 pixels every fifth is held out, a knight's move apart from the
next: held-out crops lie within such a block, training crops touch none, and edges are those of the
crop alone. So no pixel is in both parts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from fedwan.extras import require
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["load_photo_edges"]

_PHOTOS = {"astronaut": 2, "coffee": 2, "chelsea": 2, "rocket": 2, "retina": 5}
"""By name, how many times smaller a photograph is made."""
_SIZE = 32
_STRIDE = 8
_BLOCK = 64
_PERIOD = 5
_LUMINANCE = (0.2125, 0.7154, 0.0721)  # of R, G and B, ITU-R BT.709
_GAIN = 4.0  # full strength is where brightness rises by a quarter of its range per pixel


def load_photo_edges() -> tuple[Batch, Batch]:
    """Training and held-out pairs, of disjoint pixels.

    Returns:
        Two batches: x (N, 4, 32, 32) float32 in [-1, 1], the edges in channel 0 and the photograph
        in the others; y (N,) int64, which photograph.

    Raises:
        ConfigError: scikit-image is not installed.
    """
    bundled = require("skimage.data", "demo")
    crops: list[Tensor] = []
    labels: list[Tensor] = []
    shares: list[Tensor] = []
    for label, (name, factor) in enumerate(_PHOTOS.items()):
        photo = _shrink(torch.tensor(getattr(bundled, name)()), factor)
        crops.append(_cut(photo))
        labels.append(torch.full((len(crops[-1]),), label))
        shares.append(_cut(_held_out_blocks(photo)).mean(dim=(1, 2, 3)))
    photos, y, share = torch.cat(crops), torch.cat(labels), torch.cat(shares)
    x = torch.cat([_edges(photos), photos], dim=1) * 2 - 1
    held_out = (share == 1).nonzero().squeeze(1)
    # In no order, so that the first few are of all photographs.
    generator = torch.Generator().manual_seed(derive_seed("photo_edges", "held out"))
    held_out = held_out[torch.randperm(len(held_out), generator=generator)]
    return Batch(x[share == 0], y[share == 0]), Batch(x[held_out], y[held_out])


def _shrink(photo: Tensor, factor: int) -> Tensor:
    """(height, width, 3) uint8 -> (3, height / factor, width / factor) in [0, 1], by block means.

    No pixel goes into two means, so that smaller pixels have nothing in common.
    """
    height, width = photo.shape[0] // factor, photo.shape[1] // factor
    blocks = photo[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
    return blocks.float().mean(dim=(1, 3)).permute(2, 0, 1) / 255


def _held_out_blocks(photo: Tensor) -> Tensor:
    """1 where a photograph (3, height, width) is held out, else 0; (1, height, width)."""
    rows = torch.arange(photo.shape[1]).unsqueeze(1) // _BLOCK
    columns = torch.arange(photo.shape[2]).unsqueeze(0) // _BLOCK
    return ((rows + 2 * columns) % _PERIOD == 0).float().unsqueeze(0)


def _cut(image: Tensor) -> Tensor:
    """Crops of an image (channels, height, width), (N, channels, _SIZE, _SIZE)."""
    windows = image.unfold(1, _SIZE, _STRIDE).unfold(2, _SIZE, _STRIDE)
    return windows.permute(1, 2, 0, 3, 4).reshape(-1, len(image), _SIZE, _SIZE)


def _edges(photos: Tensor) -> Tensor:
    """Strength of edges in [0, 1], (N, 1, _SIZE, _SIZE), of photographs in [0, 1]."""
    brightness = (photos * torch.tensor(_LUMINANCE).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    across = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]) / 8
    kernels = torch.stack([across, across.T]).unsqueeze(1)
    gradient = conv2d(pad(brightness, (1, 1, 1, 1), mode="replicate"), kernels)
    return (_GAIN * gradient.square().sum(dim=1, keepdim=True).sqrt()).clamp(max=1)
