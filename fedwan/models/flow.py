"""The velocity network of a flow, by its settings: what is trained, and what is distilled."""

from __future__ import annotations

from typing import NamedTuple

from fedwan.models.dit import DiffusionTransformer
from fedwan.models.velocity import VelocityNetwork

__all__ = ["VelocitySizes", "build_velocity"]


class VelocitySizes(NamedTuple):
    """What a velocity network is built from, beside the data's shape and classes."""

    network: str
    """`mlp`, or `dit`, which is told the class."""
    width: int
    """Values of its residual stream, or of each token."""
    depth: int
    """Its blocks."""
    patch: int
    """Of `dit`: side of a patch."""
    heads: int
    """Of `dit`: of each attention."""


def build_velocity(
    shape: tuple[int, ...], num_classes: int, sizes: VelocitySizes
) -> VelocityNetwork | DiffusionTransformer:
    """A network with initial weights from torch's global generator.

    Args:
        shape: of one sample; images (channels, height, width) for `dit`.
        num_classes: of the data.
        sizes: checked before, for `dit` by its recipe.
    """
    if sizes.network == "dit":
        return DiffusionTransformer(
            *(shape, num_classes, sizes.patch, sizes.width, sizes.depth, sizes.heads)
        )
    assert sizes.network == "mlp"
    return VelocityNetwork(shape, sizes.width, sizes.depth)
