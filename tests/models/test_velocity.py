"""Velocity networks: the perceptron and the transformer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedwan.models.layers import LeakyTanh, clamp_images
from fedwan.models.velocity import DiffusionTransformer, VelocitySizes, build_velocity
from fedwan.state import state_of

CLASSES = 10


@pytest.mark.parametrize(
    ("shape", "network", "patch"),
    [((1, 8, 8), "mlp", 0), ((2,), "mlp", 0), ((1, 8, 8), "dit", 2), ((3, 8, 12), "dit", 4)],
    ids=str,
)
def test_before_training_the_data_are_taken_for_zero(
    shape: tuple[int, ...], network: str, patch: int
) -> None:
    velocity = build_velocity(shape, CLASSES, VelocitySizes(network, 16, 2, patch, 2))
    x, sigma = torch.randn(3, *shape), torch.tensor([1.0, 0.5, 0.01])
    told = (torch.arange(3),) if network == "dit" else ()
    expected = x / torch.tensor([1.0, 0.5, 0.05]).view(-1, *[1] * len(shape))
    torch.testing.assert_close(velocity(x, sigma, *told), expected)
    assert not any("positions" in name for name in state_of({"velocity": velocity}))
    blocks = velocity.features(x, sigma, *told)
    assert [(len(f), f.shape[-1]) for f in blocks] == [(3, 16)] * 2


def build(shape: tuple[int, ...] = (1, 8, 8), depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return DiffusionTransformer(shape, CLASSES, VelocitySizes("dit", 16, depth, 2, 2))


def test_level_class_and_every_pixel_count() -> None:
    network = build()
    with torch.no_grad():
        for parameter in network.parameters():  # as training might leave them: none is zero
            parameter += 0.1 * torch.randn(parameter.shape)
    x, sigma, labels = torch.randn(5, 1, 8, 8), torch.rand(5), torch.arange(5)
    base = network(x, sigma, labels) * sigma.clamp(min=0.05).view(-1, 1, 1, 1) - x
    other = network(x, 1 - sigma, labels) * (1 - sigma).clamp(min=0.05).view(-1, 1, 1, 1) - x
    assert not torch.allclose(base, other)
    assert not torch.allclose(network(x, sigma, labels), network(x, sigma, labels + 1))
    x = x[:1].requires_grad_()
    network(x, sigma[:1], labels[:1])[0, 0, 0, 0].backward()
    assert x.grad is not None and bool((x.grad != 0).all())


def test_a_patch_stays_in_its_place() -> None:
    """What a token says is written where it was read, whatever the order of patches."""
    network = build((2, 4, 6), depth=1)
    with torch.no_grad():
        # Tokens without positions or norms: what is written is the bias, by place within a patch.
        network.write.bias.copy_(torch.arange(8) / 100)
    sigma = torch.ones(1)
    data = -network(torch.zeros(1, 2, 4, 6), sigma, torch.zeros(1, dtype=torch.int64))
    patch = data[0, :, :2, :2]
    assert torch.equal(data[0], patch.repeat(1, 2, 3))
    assert len(patch.unique()) == 8


def test_a_value_far_out_still_has_a_gradient_and_images_are_clamped_where_points_are_not() -> None:
    h = torch.tensor([-30.0], requires_grad=True)
    assert torch.autograd.grad(LeakyTanh()(h).sum(), h)[0].item() > 0
    images, points = torch.full((1, 1, 8, 8), 1.03), torch.full((4, 2), -2.0)
    assert float(clamp_images(images).max()) == 1.0
    assert torch.equal(clamp_images(points), points)
