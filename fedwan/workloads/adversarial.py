"""Losses of a GAN: non-saturating (Goodfellow et al. 2014) with R1 (Mescheder et al. 2018).

L_D = E softplus(-D(x)) + E softplus(D(G(z))) + gamma / 2 * E |grad_x D(x)|^2      (R1, eq. 9)
L_G = E softplus(-D(G(z)))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

__all__ = ["discriminator_loss", "generator_loss", "r1_penalty", "set_gradients"]


def discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Non-saturating loss of the discriminator from logits (batch,) and (batch,); a scalar."""
    return softplus(-real_logits).mean() + softplus(fake_logits).mean()


def generator_loss(fake_logits: Tensor) -> Tensor:
    """Non-saturating loss of the generator from logits (batch,); a scalar."""
    return softplus(-fake_logits).mean()


def r1_penalty(real: Tensor, real_logits: Tensor) -> Tensor:
    """E |grad_x D(x)|^2 at real samples; a scalar that can be differentiated again.

    Args:
        real: samples (batch, …) that require a gradient, and that `real_logits` came from.
        real_logits: D(real), (batch,).
    """
    (gradient,) = torch.autograd.grad(real_logits.sum(), real, create_graph=True)
    return gradient.square().flatten(1).sum(dim=1).mean()


def set_gradients(network: nn.Module, loss: Tensor, *, keep_graph: bool = False) -> None:
    """Set `.grad` of one network's parameters to the gradient of `loss`, and no other network's.

    Unlike `loss.backward()`, which would also add the generator's loss to the discriminator's
    gradients, and so mix two games.

    Args:
        network: whose parameters the loss depends on, all of them.
        loss: a scalar.
        keep_graph: another loss of the same graph is still to come.
    """
    params = list(network.parameters())
    gradients = torch.autograd.grad(loss, params, retain_graph=keep_graph)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
