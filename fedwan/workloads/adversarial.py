"""Losses of a GAN.

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


class GanLoss(NamedTuple):
    """Both networks' losses, scalars, of logits (batch,) for real and (batch,) for generated."""

    discriminator: Callable[[Tensor, Tensor], Tensor]
    generator: Callable[[Tensor, Tensor], Tensor]
    """The real samples' logits matter to relativistic losses alone."""


LOSSES: dict[str, GanLoss] = {
    "non_saturating": GanLoss(
        lambda real, fake: softplus(-real).mean() + softplus(fake).mean(),
        lambda real, fake: softplus(-fake).mean(),
    ),
    "hinge": GanLoss(
        lambda real, fake: relu(1 - real).mean() + relu(1 + fake).mean(),
        lambda real, fake: -fake.mean(),
    ),
    "relativistic": GanLoss(
        lambda real, fake: softplus(fake - real).mean(),
        lambda real, fake: softplus(real - fake).mean(),
    ),
}


def gradient_penalty(samples: Tensor, logits: Tensor) -> Tensor:
    """E |grad_x D(x)|^2, a scalar that can be differentiated again: R1 or R2, but for its weight.

    `samples`, (batch, …), require a gradient; `logits`, (batch,), are D's of them.
    """
    (gradient,) = torch.autograd.grad(logits.sum(), samples, create_graph=True)
    return gradient.square().flatten(1).sum(dim=1).mean()
