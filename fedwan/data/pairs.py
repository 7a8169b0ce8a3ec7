"""Pairs of images from a folder: each file holds A | B side by side, as pix2pix's data sets do.

Every tenth file in name order is held out, so that sites which hold the same folder hold out the
same files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = ["LEAST_FILES", "load_pairs"]

LEAST_FILES = 8
"""Half of them to train on, half to judge by."""
_LEAST_HELD_OUT = 4
_ENDINGS = (".png", ".jpg", ".jpeg")


def load_pairs(folder: Path, size: int, direction: str) -> tuple[Batch, Batch]:
    """Training and held-out pairs; 6 * size * size * 4 bytes of memory each.

    Args:
        folder: of PNG and JPEG files, which may lie in folders of their own.
        size: pixels a side that each half is resized to.
        direction: `b_to_a` makes the left half from the right one, anything else the right one from
            the left.

    Returns:
        Two batches: x (N, 6, size, size) float32 in [-1, 1], the input before the target; y (N,)
        int64, all zero.

    Raises:
        ConfigError: there is no such folder, too few images in it, or one that is no pair.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"data.path = {str(folder)!r} is no folder on this machine; "
            "name one that every site has"
        )
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS)
    if len(files) < LEAST_FILES:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds {len(files)} PNG or JPEG files; "
            f"put {LEAST_FILES} or more there"
        )
    x = torch.stack([_read(file, size, direction) for file in files])
    y = torch.zeros(len(x), dtype=torch.int64)
    every = min(10, len(x) // _LEAST_HELD_OUT)
    is_held_out = torch.arange(len(x)) % every == 0
    return Batch(x[~is_held_out], y[~is_held_out]), Batch(x[is_held_out], y[is_held_out])


def _read(file: Path, size: int, direction: str) -> Tensor:
    """One file's pair, (6, size, size)."""
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(
            f"data.path: {file} cannot be read as an image ({error}); remove it"
        ) from None
    width, height = image.size
    if width % 2:
        raise ConfigError(
            f"data.path: {file} is {width} pixels wide, which two images side by side cannot be; "
            "make the width even"
        )
    half = width // 2
    boxes = [(0, 0, half, height), (half, 0, width, height)]
    if direction == "b_to_a":
        boxes.reverse()
    # Cut before resizing: `resize(box=…)` would look across the middle.
    halves = [
        np.asarray(image.crop(box).resize((size, size), Image.Resampling.BICUBIC)) for box in boxes
    ]
    pair = torch.from_numpy(np.concatenate(halves, axis=2)).permute(2, 0, 1)
    return pair.float() * (2 / 255) - 1
