"""Three handwritten digits as the three channels of one image: a thousand modes.

After Metz et al. 2017 (section 3.3.1), who stacked MNIST. Training images are stacked from training
digits alone and held-out ones from held-out digits alone, so the two parts share no scan.

How many: a mode has twenty training images, enough for a split by label or Dirichlet to deal out,
and a training digit is part of about 43. Two held-out images of each mode have quality measured on
three times 2000 generated ones: an even generator leaves two or three of the thousand modes out by
chance, where with one of each it would leave fifty.
"""

from __future__ import annotations

import torch

from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["CHANNELS", "NUM_MODES", "SHAPE", "stack_digits"]

CHANNELS = 3
SHAPE = (CHANNELS, 8, 8)
_DIGITS = 10
NUM_MODES = _DIGITS**CHANNELS
_TRAIN_PER_MODE = 20
_HELD_OUT_PER_MODE = 2


def stack_digits(train: Batch, held_out: Batch) -> tuple[Batch, Batch]:
    """Training and held-out images, from disjoint digits; the same ones in every process.

    Args:
        train: digits (N, 1, 8, 8) with labels 0 … 9; some of each.
        held_out: other digits of the same kind.

    Returns:
        Two batches: x (N, 3, 8, 8) as the digits are scaled, y (N,) int64 = 100 a + 10 b + c for
        digits a, b and c in channels 0, 1 and 2; 20,000 and 2000 images, as many of each mode,
        shuffled.
    """
    return _stack(train, _TRAIN_PER_MODE, "train"), _stack(held_out, _HELD_OUT_PER_MODE, "held out")


def _stack(digits: Batch, num_per_mode: int, part: str) -> Batch:
    generator = torch.Generator().manual_seed(derive_seed("stacked_digits", part))
    y = torch.arange(NUM_MODES).repeat(num_per_mode)
    y = y[torch.randperm(len(y), generator=generator)]  # so that the first few are of all kinds
    chosen = torch.empty(len(y), CHANNELS, dtype=torch.int64)
    for channel in range(CHANNELS):
        wanted = y // _DIGITS ** (CHANNELS - 1 - channel) % _DIGITS
        for digit in range(_DIGITS):
            members = (digits.y == digit).nonzero().squeeze(1)
            places = (wanted == digit).nonzero().squeeze(1)
            draw = torch.randint(len(members), (len(places),), generator=generator)
            chosen[places, channel] = members[draw]
    return Batch(digits.x.squeeze(1)[chosen], y)
