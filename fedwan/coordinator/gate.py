"""The gate: what a contribution must be before it may be merged.

One pass over the payload checks its layout, its checksum and that every value is finite, and
measures the norm of each network's part, from the codes themselves. Nothing of a contribution that
fails reaches the global state, since merging has not begun.
"""

from __future__ import annotations

import math
from collections import defaultdict

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.errors import PayloadError
from fedwan.state import Layout, Role, network_of

__all__ = ["inspect"]


def inspect(payload: Source, layout: Layout, codec: Codec) -> dict[str, float]:
    """Check a payload from end to end and measure it.

    Args:
        payload: as received.
        layout: of the fragment it claims to be.
        codec: the run's codec for contributions.

    Returns:
        Norm of the parameters' part, by network.

    Raises:
        PayloadError: see `Codec.read_each`; or a value is not finite.
    """
    squares: dict[str, float] = defaultdict(float)
    for name, coded in codec.read_each(payload, layout):
        spec = layout[name]
        if spec.role is not Role.PARAMETER and not spec.dtype.is_floating_point:
            continue
        square = coded.sum_of_squares()
        if not math.isfinite(square):
            raise PayloadError(
                f"tensor {name!r} holds values that are not finite, or too large to square; "
                "lower the inner learning rate or clip the gradients at that site"
            )
        if spec.role is Role.PARAMETER:
            squares[network_of(name)] += square
        elif spec.role is Role.VARIANCE and bool((coded.tensor() < 0).any()):
            raise PayloadError(f"variance {name!r} is below zero; refused")
    return {network: math.sqrt(square) for network, square in squares.items()}
