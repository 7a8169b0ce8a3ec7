"""Losses of a GAN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedwan.workloads.adversarial import (
    discriminator_loss,
    generator_loss,
    r1_penalty,
    set_gradients,
)


def test_a_discriminator_that_knows_nothing_loses_two_bits_of_nature() -> None:
    zeros = torch.zeros(5)
    assert float(discriminator_loss(zeros, zeros)) == pytest.approx(2 * math.log(2))
    assert float(generator_loss(zeros)) == pytest.approx(math.log(2))


def test_losses_stay_finite_for_huge_logits() -> None:
    huge = torch.full((3,), 1e4)
    assert float(discriminator_loss(huge, -huge)) == 0
    assert float(generator_loss(-huge)) == pytest.approx(1e4)


def test_the_penalty_of_a_linear_discriminator_is_its_squared_weight() -> None:
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    real = torch.randn(6, 2, requires_grad=True)
    penalty = r1_penalty(real, real @ weight)
    assert penalty.item() == pytest.approx(25)
    (gradient,) = torch.autograd.grad(penalty, weight)
    assert gradient.tolist() == pytest.approx([6, 8])


def test_the_penalty_is_a_mean_over_the_batch_and_a_sum_over_the_sample() -> None:
    real = torch.ones(4, 1, 2, 3, requires_grad=True)
    penalty = r1_penalty(real, 2 * real.flatten(1).sum(dim=1))
    assert penalty.item() == pytest.approx(24)


def test_one_networks_gradients_leave_the_others_alone() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    loss = second(first(torch.ones(3, 2))).sum()
    set_gradients(second, loss, keep_graph=True)
    kept = [p.grad.clone() for p in second.parameters() if p.grad is not None]
    assert len(kept) == 2
    assert all(p.grad is None for p in first.parameters())
    set_gradients(first, -loss)
    assert all(p.grad is not None for p in first.parameters())
    assert all(
        torch.equal(p.grad, k)
        for p, k in zip(second.parameters(), kept, strict=True)
        if p.grad is not None
    )
