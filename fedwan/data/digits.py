"""Real handwritten digits, one by one, or three as the channels of an image: a thousand modes.

Scikit-learn's bundled 1797 images of 8x8 pixels (UCI, Alpaydin 1998). Forty images of each digit
are held out, the same ones whatever the run's seed, so that figures of different runs compare.

Stacks are after Metz et al. 2017 (section 3.3.1), who stacked MNIST. Training images are stacked
from training digits alone and held-out ones from held-out digits alone, so the parts share no scan.
A mode has twenty training images, enough for a split to deal out, and two held-out ones: quality is
then measured on three times 2000 generated images, of which an even generator leaves two or three
of the thousand modes out by chance, where with one of each it would leave fifty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.extras import require
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["load_digits", "stack_digits"]

_NUM_CLASSES = 10
_HELD_OUT_PER_CLASS = 40
_MAX_INK = 16.0  # a pixel counts the dark dots of a 4x4 block of the scan
_CHANNELS = 3
_TRAIN_PER_MODE, _HELD_OUT_PER_MODE = 20, 2


def load_digits() -> tuple[Batch, Batch]:
    """Training and held-out images, disjoint.

    Returns:
        Two batches: x (N, 1, 8, 8) float32 in [-1, 1], y (N,) int64; 1397 and 400 images.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    bundled = require("sklearn.datasets", "demo").load_digits()
    x = torch.tensor(bundled.images, dtype=torch.float32).unsqueeze(1) * (2 / _MAX_INK) - 1
    y = torch.tensor(bundled.target, dtype=torch.int64)
    held_out = _stratified_mask(y)
    return Batch(x[~held_out], y[~held_out]), Batch(x[held_out], y[held_out])


def _stratified_mask(y: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("digits", "held out"))
    mask = torch.zeros(len(y), dtype=torch.bool)
    for label in range(_NUM_CLASSES):
        members = (y == label).nonzero().squeeze(1)
        chosen = torch.randperm(len(members), generator=generator)[:_HELD_OUT_PER_CLASS]
        mask[members[chosen]] = True
    return mask


def stack_digits(train: Batch, held_out: Batch) -> tuple[Batch, Batch]:
    """Training and held-out images from disjoint digits; the same ones in every process.

    Returns:
        Two batches: x (N, 3, 8, 8) as the digits are scaled, y (N,) int64 = 100 a + 10 b + c for
        digits a, b and c in channels 0, 1 and 2; 20,000 and 2000 images, as many of each mode,
        shuffled.
    """
    return _stack(train, _TRAIN_PER_MODE, "train"), _stack(held_out, _HELD_OUT_PER_MODE, "held out")


def _stack(digits: Batch, num_per_mode: int, part: str) -> Batch:
    generator = torch.Generator().manual_seed(derive_seed("stacked_digits", part))
    y = torch.arange(_NUM_CLASSES**_CHANNELS).repeat(num_per_mode)
    y = y[torch.randperm(len(y), generator=generator)]  # so that the first few are of all kinds
    chosen = torch.empty(len(y), _CHANNELS, dtype=torch.int64)
    for channel in range(_CHANNELS):
        wanted = y // _NUM_CLASSES ** (_CHANNELS - 1 - channel) % _NUM_CLASSES
        for digit in range(_NUM_CLASSES):
            members = (digits.y == digit).nonzero().squeeze(1)
            places = (wanted == digit).nonzero().squeeze(1)
            draw = torch.randint(len(members), (len(places),), generator=generator)
            chosen[places, channel] = members[draw]
    return Batch(digits.x.squeeze(1)[chosen], y)
