"""Samples of a flow from fixed noise: the same noise for all networks that are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedwan.models.layers import clamp_images
from fedwan.rng import derive_seed
from fedwan.workloads.euler import EulerSolver
from fedwan.workloads.guidance import balanced_labels, guide

__all__ = ["sample_flow"]


@torch.no_grad()
def sample_flow(
    velocity: Callable[..., Tensor],
    solver: EulerSolver,
    shape: tuple[int, ...],
    num: int,
    seed: int,
    num_classes: int = 0,
    guidance: float = 1.0,
) -> Tensor:
    """Samples, (num, *shape), images clamped to [-1, 1]; no gradient.

    Args:
        velocity: (x, sigma) -> d x / d sigma; or (x, sigma, labels), if classes are told.
        solver: its steps, on the device to sample on.
        shape: of one sample.
        num: how many.
        seed: of the noise and of the order of the labels, which are as many of each class.
        num_classes: that the velocity is told; 0 for none.
        guidance: see `fedwan.workloads.guidance`.
    """
    device = solver.sigmas.device
    generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
    noise = torch.randn(num, *shape, generator=generator).to(device)
    if num_classes:
        generator = torch.Generator().manual_seed(derive_seed(seed, "labels"))
        labels = balanced_labels(num, num_classes, generator).to(device)
        velocity = guide(velocity, labels, num_classes, guidance)
    return clamp_images(solver.sample(velocity, noise))
