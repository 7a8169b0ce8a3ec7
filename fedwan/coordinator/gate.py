"""The gate: what a contribution must be before it may be merged.

One pass over the payload checks its layout, its checksum and that every value is finite, and
measures the norm of each network's part. Nothing of a contribution that fails reaches the global
state, since merging has not begun.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.errors import PayloadError
from fedwan.state import Layout, Role, network_of

__all__ = ["inspect"]


def inspect(
    payload: Source, layout: Layout, codec: Codec, max_norm: float = 0.0
) -> dict[str, float]:
    """Check a payload from end to end and measure it.

    Holds one decoded tensor at a time.

    Args:
        payload: as received.
        layout: of the fragment it claims to be.
        codec: the run's codec for contributions.
        max_norm: largest norm a network's part may have; 0 sets no limit.

    Returns:
        Norm of the parameters' part, by network.

    Raises:
        PayloadError: see `Codec.decode_each`; or a value is not finite, or a norm is too large.
    """
    squares: dict[str, float] = defaultdict(float)
    for name, value in codec.decode_each(payload, layout):
        if not value.is_floating_point():
            continue
        # Half precision is widened: its squares overflow long before its values do.
        norm = torch.linalg.vector_norm(value if value.dtype is torch.float64 else value.float())
        square = float(norm) ** 2
        if not math.isfinite(square):
            raise PayloadError(
                f"tensor {name!r} holds values that are not finite, or too large to square; "
                "lower the inner learning rate or clip the gradients at that site"
            )
        if layout[name].role is Role.PARAMETER:
            squares[network_of(name)] += square
        elif layout[name].role is Role.VARIANCE and bool((value < 0).any()):
            raise PayloadError(f"variance {name!r} is below zero; refused")
    norms = {network: math.sqrt(square) for network, square in squares.items()}
    for network, norm in norms.items():
        if max_norm and norm > max_norm:
            raise PayloadError(
                f"the {network}'s part has norm {norm:.4g}, above round.max_norm={max_norm:g}; "
                "lower the inner learning rate at that site, or raise round.max_norm"
            )
    return norms
