"""Layers that networks share."""

from __future__ import annotations

import torch

from fedwan.models.layers import LeakyTanh, clamp_images


def test_a_value_far_out_still_has_a_gradient_where_tanh_has_none() -> None:
    h = torch.tensor([-30.0], requires_grad=True)
    assert torch.autograd.grad(h.tanh().sum(), h)[0].item() == 0
    assert torch.autograd.grad(LeakyTanh()(h).sum(), h)[0].item() > 0


def test_images_are_clamped_and_points_are_not() -> None:
    images, points = torch.full((1, 1, 8, 8), 1.03), torch.full((4, 2), -2.0)
    assert float(clamp_images(images).max()) == 1.0
    assert torch.equal(clamp_images(points), points)
