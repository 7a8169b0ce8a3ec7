"""Losses of a GAN, and how each network gets the gradient of its own.

    non_saturating   L_D = E softplus(-D(x)) + E softplus(D(G(z)))      Goodfellow et al. 2014
                     L_G = E softplus(-D(G(z)))
    hinge            L_D = E max(0, 1 - D(x)) + E max(0, 1 + D(G(z)))   Lim and Ye 2017
                     L_G = -E D(G(z))
    relativistic     L_D = E softplus(D(G(z)) - D(x))                   Jolicoeur-Martineau 2019,
                     L_G = E softplus(D(x) - D(G(z)))                   in pairs: Huang et al. 2024

Each may have R1 and R2, gamma / 2 * E |grad_x D(x)|^2 at real and at generated samples
(Mescheder et al. 2018, equations 9 and 10).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import relu, softplus

__all__ = ["LOSSES", "GanLoss", "discriminator_loss", "generator_loss", "gradient_penalty"]


class GanLoss(NamedTuple):
    """Both networks' losses, of logits (batch,) for real and (batch,) for generated samples."""

    discriminator: Callable[[Tensor, Tensor], Tensor]
    """A scalar."""
    generator: Callable[[Tensor, Tensor], Tensor]
    """A scalar; the real samples' logits matter to relativistic losses alone."""


def discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Non-saturating loss of the discriminator from logits (batch,) and (batch,); a scalar."""
    return softplus(-real_logits).mean() + softplus(fake_logits).mean()


def generator_loss(fake_logits: Tensor) -> Tensor:
    """Non-saturating loss of the generator from logits (batch,); a scalar."""
    return softplus(-fake_logits).mean()


def _hinge_discriminator(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    return relu(1 - real_logits).mean() + relu(1 + fake_logits).mean()


LOSSES: dict[str, GanLoss] = {
    "non_saturating": GanLoss(discriminator_loss, lambda real, fake: generator_loss(fake)),
    "hinge": GanLoss(_hinge_discriminator, lambda real, fake: -fake.mean()),
    "relativistic": GanLoss(
        lambda real, fake: softplus(fake - real).mean(),
        lambda real, fake: softplus(real - fake).mean(),
    ),
}
"""By name."""


def gradient_penalty(samples: Tensor, logits: Tensor) -> Tensor:
    """E |grad_x D(x)|^2, a scalar that can be differentiated again: R1 or R2, but for its weight.

    `samples`, (batch, …), require a gradient; `logits`, (batch,), are D's of them.
    """
    (gradient,) = torch.autograd.grad(logits.sum(), samples, create_graph=True)
    return gradient.square().flatten(1).sum(dim=1).mean()
