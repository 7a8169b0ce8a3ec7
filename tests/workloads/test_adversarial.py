"""Losses of a GAN."""

from __future__ import annotations

import math

import pytest
import torch

from fedwan.workloads.adversarial import (
    LOSSES,
    discriminator_loss,
    generator_loss,
    gradient_penalty,
)


def test_a_discriminator_that_knows_nothing_loses_two_bits_of_nature() -> None:
    zeros = torch.zeros(5)
    assert float(discriminator_loss(zeros, zeros)) == pytest.approx(2 * math.log(2))
    assert float(generator_loss(zeros)) == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", LOSSES)
def test_each_network_gains_where_the_other_loses(name: str) -> None:
    loss = LOSSES[name]
    real = torch.randn(6, requires_grad=True)
    fake = torch.randn(6, requires_grad=True)
    up, down = torch.autograd.grad(loss.discriminator(real, fake), (real, fake))
    assert (up <= 0).all() and (down >= 0).all()
    (gain,) = torch.autograd.grad(loss.generator(real, fake), fake)
    assert (gain < 0).all()


def test_the_hinge_leaves_what_is_beyond_its_margin() -> None:
    loss = LOSSES["hinge"]
    assert float(loss.discriminator(torch.tensor([1.0, 3.0]), torch.tensor([-1.0, -7.0]))) == 0
    assert float(loss.discriminator(torch.zeros(2), torch.zeros(2))) == 2
    assert float(loss.generator(torch.zeros(1), torch.tensor([2.0, 4.0]))) == -3


def test_the_penalty_of_a_linear_discriminator_is_its_squared_weight() -> None:
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    real = torch.randn(6, 2, requires_grad=True)
    penalty = gradient_penalty(real, real @ weight)
    assert penalty.item() == pytest.approx(25)
    (gradient,) = torch.autograd.grad(penalty, weight)
    assert gradient.tolist() == pytest.approx([6, 8])
