"""Rectified flow (Liu et al. 2022): a straight path between data and noise, and times to train at.

With noise level sigma from 0 (data) to 1 (noise), in the convention of diffusers:

    x_sigma = sigma * noise + (1 - sigma) * data        target = d x / d sigma = noise - data

Times as in Esser et al. 2024 (2403.03206, section 3.1 and equation 23); `EulerSolver` follows the
velocity from sigma = 1 down to exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TIMES", "draw_sigma", "flow_sigmas", "interpolate", "shift_sigma"]

TIMES = ("logit_normal", "uniform")
"""What noise levels are drawn from."""


def draw_sigma(
    num: int, generator: torch.Generator, times: str = "logit_normal", shift: float = 1.0
) -> Tensor:
    """Noise levels to train at, (num,) in [0, 1).

    Args:
        num: how many.
        generator: on the CPU.
        times: `uniform`, or `logit_normal`, the sigmoid of a standard normal (equation 19 with
            m = 0, s = 1): most work goes to the middle of the way.
        shift: see `shift_sigma`.
    """
    assert times in TIMES
    if times == "uniform":
        sigma = torch.rand(num, generator=generator)
    else:
        sigma = torch.randn(num, generator=generator).sigmoid()
    return shift_sigma(sigma, shift)


def flow_sigmas(num: int, shift: float = 1.0) -> Tensor:
    """A schedule of equal steps, shifted: (num,) float64, from above 0 to exactly 1."""
    # Quotients, not differences: every level is the nearest number to k / num.
    return shift_sigma(torch.arange(1, num + 1, dtype=torch.float64) / num, shift)


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Noise levels moved towards the noise by a shift above 1: s sigma / (1 + (s - 1) sigma).

    Large images need more noise to be destroyed, hence a shift of 3 or so (equation 23). The shape
    stays.
    """
    # The denominator, so written, leaves sigma = 1 at exactly 1, and all as it is where shift = 1.
    return shift * sigma / (shift * sigma + (1 - sigma))


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
