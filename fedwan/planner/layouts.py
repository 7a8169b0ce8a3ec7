"""A layout for a model of which only the number of values is known.

Square layers of equal size, each with a bias: what a transformer's or a U-Net's middle looks like.
Fragments are dealt out by whole modules, so it must have more of them than fragments are useful.
"""

from __future__ import annotations

import math

import torch

from fedwan.errors import ConfigError
from fedwan.state import Layout, Role, TensorSpec

__all__ = ["NETWORK", "synthetic_layout"]

NETWORK = "model"
MODULES = 40
"""Of a large model; pix2pix's larger network has 30."""


def synthetic_layout(num_values: int) -> Layout:
    """Specs of a network with exactly so many values.

    Raises:
        ConfigError: there are none.

    >>> layout = synthetic_layout(57_182_660)
    >>> sum(spec.num_values for spec in layout.values())
    57182660
    """
    if num_values < 1:
        raise ConfigError(f"params = {num_values} is out of range; choose 1 or more")
    count = max(1, min(MODULES, num_values // 2))
    layout: Layout = {}
    left = num_values
    for index in range(count):
        share = left // (count - index)
        left -= share
        width = max(1, math.isqrt(share))
        rows, rest = divmod(share, width)
        name = f"{NETWORK}/layers.{index}"
        layout[f"{name}.weight"] = _parameter(rows, width)
        if rest:
            layout[f"{name}.bias"] = _parameter(rest)
    return dict(sorted(layout.items()))


def _parameter(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.float32, Role.PARAMETER)
