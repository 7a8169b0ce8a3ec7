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
"""By name."""


def gradient_penalty(samples: Tensor, logits: Tensor) -> Tensor:
    """E |grad_x D(x)|^2, a scalar that can be differentiated again: R1 or R2, but for its weight.

    `samples`, (batch, …), require a gradient; `logits`, (batch,), are D's of them.
    """
    (gradient,) = torch.autograd.grad(logits.sum(), samples, create_graph=True)
    return gradient.square().flatten(1).sum(dim=1).mean()


def share_above(scores: Tensor, others: Tensor) -> Tensor:
    """Share of pairs of (n,) and (m,) in which the score is above; ties count half. In [0, 1].

    The area under the ROC curve (Mann and Whitney 1947): 0.5 if both look alike, 1 if they are
    apart. Of n scores each, 0.5 has a standard error of 1 / sqrt(6 n): 0.05 of 64.

    >>> float(share_above(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0])))
    0.75
    """
    gap = scores.flatten().unsqueeze(1) - others.flatten()
    return gap.sign().mean() / 2 + 0.5


def spread(samples: Tensor) -> Tensor:
    """Mean Euclidean distance of two different samples of (n, …), a scalar: small in collapse."""
    flat = samples.flatten(1).float()
    num = len(flat)
    # Differences, not dot products: those lose the digits of samples that are nearly alike.
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.sum() / (num * (num - 1))
