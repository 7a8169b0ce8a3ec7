"""Phased consistency (Wang et al. 2024, 2405.18407): a student that jumps to the end of its phase.

A teacher's n solver steps are dealt into m phases. The student learns one jump from anywhere in a
phase down to its edge s, so that m jumps make a sample:

    f(x, sigma) = x + (s - sigma) v(x, sigma)

What it learns is to agree with itself: at neighbouring levels of the teacher's path it must arrive
at the same place, and at the edge it stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.workloads.flow import EulerSolver, per_sample

__all__ = ["Phases", "consistency_loss", "jump", "renoise"]

_HUBER = 1e-3  # below it the loss is square, as in the paper's scripts


class Phases:
    """The levels of n solver steps and of m phases over them; edges are among the n's levels.

    Args:
        sigmas: of the n solver steps, (n,), see `flow_sigmas`.
        num_phases: m, from 1 to n.

    Attributes:
        solver: the n steps.
        jumps: one step per phase, to sample with.
        edges: where the phase of each solver step ends, (n,) float64.
        tops: where it starts, (n,) float64.
    """

    def __init__(self, sigmas: Tensor, num_phases: int) -> None:
        self.solver = EulerSolver(sigmas, len(sigmas))
        self.jumps = EulerSolver(sigmas, num_phases)
        # The phase of the step from timestep i + 1 to i: the first that starts above i.
        phase = torch.searchsorted(self.jumps.timesteps, self.solver.timesteps_prev, right=True)
        self.edges, self.tops = self.jumps.sigmas_prev[phase], self.jumps.sigmas[phase]


def jump(x: Tensor, velocity: Tensor, sigma: Tensor, edge: Tensor) -> Tensor:
    """Samples at `edge`, (batch, …), by one straight step from `sigma`; exactly x where they agree.

    `velocity` is d x / d sigma at x, (batch, …); `sigma` and `edge` are (batch,).
    """
    return x + per_sample(edge - sigma, x) * velocity


def renoise(x: Tensor, noise: Tensor, sigma: Tensor, higher: Tensor) -> Tensor:
    """Samples of one noise level, (batch, …), as samples of a `higher` one; both (batch,), below 1.

    a x + b noise with a = (1 - higher) / (1 - sigma) and a^2 sigma^2 + b^2 = higher^2.
    """
    share = (1 - higher) / (1 - sigma)
    rest = (higher.square() - (share * sigma).square()).clamp(min=0).sqrt()
    return per_sample(share, x) * x + per_sample(rest, x) * noise


def consistency_loss(made: Tensor, target: Tensor) -> Tensor:
    """Pseudo-Huber loss of every value, a scalar: about |made - target|, square where tiny."""
    return ((made - target).square() + _HUBER**2).sqrt().mean() - _HUBER
