"""Generators and discriminators."""

from __future__ import annotations

import pytest
import torch

from fedwan.models.gan import build_discriminator, build_generator

SHAPES = [(1, 8, 8), (3, 8, 8), (2,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_have_the_shape_of_the_data_and_one_logit_each(shape: tuple[int, ...]) -> None:
    samples = build_generator(shape, latents=5, width=4)(torch.randn(7, 5))
    assert samples.shape == (7, *shape)
    assert build_discriminator(shape, width=4)(samples).shape == (7,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_sample_does_not_depend_on_the_others_in_its_batch(shape: tuple[int, ...]) -> None:
    generator, discriminator = build_generator(shape, 5, 4), build_discriminator(shape, 4)
    z = torch.randn(4, 5)
    torch.testing.assert_close(generator(z)[:1], generator(z[:1]))
    x = torch.randn(4, *shape)
    torch.testing.assert_close(discriminator(x)[:1], discriminator(x[:1]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_but_parameters_needs_merging(shape: tuple[int, ...]) -> None:
    for network in (build_generator(shape, 5, 4), build_discriminator(shape, 4)):
        assert not list(network.buffers())


def test_the_demo_networks_are_small() -> None:
    networks = (build_generator((1, 8, 8), 16, 24), build_discriminator((1, 8, 8), 24))
    assert sum(p.numel() for network in networks for p in network.parameters()) < 100_000
