"""Losses of a GAN, and the scores that its networks are examined by."""

from __future__ import annotations

import math

import pytest
import torch

from fedwan.workloads.adversarial import LOSSES, gradient_penalty
from fedwan.workloads.base import spread


def test_losses_are_those_of_their_papers() -> None:
    hinge, plain, zeros = LOSSES["hinge"], LOSSES["non_saturating"], torch.zeros(2)
    assert float(hinge.discriminator(torch.tensor([1.0, 3.0]), torch.tensor([-1.0, -7.0]))) == 0
    assert float(hinge.discriminator(zeros, zeros)) == 2
    assert float(hinge.generator(zeros, torch.tensor([2.0, 4.0]))) == -3
    assert float(plain.discriminator(zeros, zeros)) == pytest.approx(2 * math.log(2))
    assert float(plain.generator(zeros, zeros)) == pytest.approx(math.log(2))


def test_the_penalty_of_a_linear_discriminator_is_its_squared_weight() -> None:
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    real = torch.randn(6, 2, requires_grad=True)
    penalty = gradient_penalty(real, real @ weight)
    assert penalty.item() == pytest.approx(25)
    (gradient,) = torch.autograd.grad(penalty, weight)
    assert gradient.tolist() == pytest.approx([6, 8])


def test_spread_is_the_mean_distance_between_two_different_samples() -> None:
    assert float(spread(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))) == pytest.approx(5.0)
    base = torch.full((2, 1000), 10.0)
    base[1, 0] += 1e-3  # what is nearly alike is not lost to rounding
    assert float(spread(base)) == pytest.approx(1e-3, rel=1e-2)
