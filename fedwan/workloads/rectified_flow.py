"""Rectified flow (Liu et al. 2022; logit-normal times: Esser et al. 2024, section 3.1).

With noise level sigma from 0 (data) to 1 (noise), in the convention of diffusers:

    x_sigma = sigma * noise + (1 - sigma) * data        target = d x / d sigma = noise - data

Sampling follows the velocity from sigma = 1 down to exactly 0 in Euler steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["draw_sigma", "euler_sample", "interpolate"]


def draw_sigma(num: int, generator: torch.Generator) -> Tensor:
    """Logit-normal noise levels, (num,) in (0, 1): most work goes to the middle of the way."""
    return torch.randn(num, generator=generator).sigmoid()


def interpolate(data: Tensor, noise: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Noised samples and their target velocity.

    Args:
        data: (batch, …).
        noise: standard normal, of the same shape.
        sigma: (batch,) in [0, 1].

    Returns:
        x_sigma and noise - data, both of the shape of `data`.
    """
    sigma = sigma.view(-1, *[1] * (data.dim() - 1))
    return sigma * noise + (1 - sigma) * data, noise - data


@torch.no_grad()
def euler_sample(
    velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, num_steps: int
) -> Tensor:
    """Integrate from noise to data with equal Euler steps.

    Args:
        velocity: (x (batch, …), sigma (batch,)) -> d x / d sigma.
        noise: standard normal, (batch, …).
        num_steps: steps; the first is taken at sigma = 1, the last ends at sigma = 0.

    Returns:
        Samples at sigma = 0, (batch, …).
    """
    # Quotients, not differences: both ends and every level are exact, for any number of steps.
    sigmas = [(num_steps - step) / num_steps for step in range(num_steps + 1)]
    x = noise
    for sigma, next_sigma in zip(sigmas, sigmas[1:], strict=False):
        level = torch.full((len(x),), sigma, device=x.device, dtype=x.dtype)
        x = x + (next_sigma - sigma) * velocity(x, level)
    return x
