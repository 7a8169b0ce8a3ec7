"""Generators and discriminators."""

from __future__ import annotations

import pytest
from torch import nn

from fedwan.models.gan import SIDES, build_discriminator, build_generator
from fedwan.rng import seeded_init
from fedwan.state import hash_state, state_of


@pytest.mark.parametrize(
    ("channels", "num_classes", "generator", "discriminator", "sha256"),
    [
        (1, 0, 44_449, 32_209, "c3d318b7463f87e14cae16f0a4ed6a08b36ad204fde134581a8fe22827f4a581"),
        (3, 10, 57_331, 40_321, "7a3a6e7df042562a946e58ce31373075506b9d42540d26086ff118e8bff39c63"),
    ],
)
def test_networks_of_8_pixels_a_side_are_what_they_were_to_the_bit(
    channels: int, num_classes: int, generator: int, discriminator: int, sha256: str
) -> None:
    """Made by `build` of `sites/gan.py` when it knew no other side, at the default settings."""
    shape = (channels, 8, 8)
    with seeded_init(0):
        networks = {
            "discriminator": build_discriminator(shape, 24, num_classes),
            "generator": build_generator(shape, 16, 24, num_classes),
        }
    counts = [sum(p.numel() for p in network.parameters()) for network in networks.values()]
    assert counts == [discriminator, generator]
    assert hash_state(state_of(networks)) == sha256


def test_each_doubling_of_the_side_adds_a_level_to_both_networks() -> None:
    for level, side in enumerate(SIDES, start=1):
        for network in (
            build_generator((3, side, side), 5, 4),
            build_discriminator((3, side, side), 4),
        ):
            convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
            assert len(convolutions) == level + 2
            assert max(c.out_channels for c in convolutions) == 4 * min(2**level, 8)
    assert SIDES == (8, 16, 32, 64, 128, 256)
