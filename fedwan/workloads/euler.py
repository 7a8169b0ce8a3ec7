"""Euler steps down a schedule of noise levels, to sample a flow or to distil one.

The solver of phased consistency models (Wang et al. 2024, 2405.18407), whose scripts take n of a
teacher's T timesteps and go from each to the one below. As written there it ends at the schedule's
lowest level instead of at the data, and starts below pure noise where n does not divide T. Here
level 0 belongs to the schedule, and steps are rounded so that both ends are met for any n and T:

    t_k = round(k T / n)        x(t_k-1) = x(t_k) + (sigma(t_k-1) - sigma(t_k)) v,   k = n … 1
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["EulerSolver"]


class EulerSolver:
    """n steps from noise to data; step n - 1 starts at the noise, step 0 ends at the data.

    Args:
        sigmas: noise levels of timesteps 1 … T, (T,), rising to exactly 1; see `flow_sigmas`. The
            solver's own tensors live on their device.
        num_steps: n, from 1 to T.

    Attributes:
        timesteps: where each step starts, (n,) int64, rising to T.
        timesteps_prev: where it ends, (n,) int64, rising from 0.
        sigmas: the noise level where each step starts, (n,) float64, rising to 1.
        sigmas_prev: where it ends, (n,) float64, rising from 0.

    Raises:
        ValueError: levels that do not rise to 1, or more steps than timesteps.
    """

    def __init__(self, sigmas: Tensor, num_steps: int) -> None:
        num_timesteps = len(sigmas)
        if not 1 <= num_steps <= num_timesteps:
            raise ValueError(
                f"num_steps = {num_steps} for {num_timesteps} timesteps; choose 1 to "
                f"{num_timesteps}"
            )
        levels = torch.cat([sigmas.new_zeros(1), sigmas]).double()
        if float(levels[-1]) != 1 or not bool((levels.diff() > 0).all()):
            raise ValueError(
                f"sigmas go from {float(levels[1]):g} to {float(levels[-1]):g}; give levels above "
                "0 that rise to exactly 1, the lowest first"
            )
        # Rounded half up: distinct since n <= T, and 0 and T at the ends.
        ends = [
            (2 * k * num_timesteps + num_steps) // (2 * num_steps) for k in range(num_steps + 1)
        ]
        timesteps = torch.tensor(ends, device=sigmas.device)
        self.timesteps, self.timesteps_prev = timesteps[1:], timesteps[:-1]
        self.sigmas, self.sigmas_prev = levels[timesteps[1:]], levels[timesteps[:-1]]

    def step(self, x: Tensor, velocity: Tensor, index: Tensor) -> Tensor:
        """One step of each sample.

        Args:
            x: samples at `sigmas[index]`, (batch, …).
            velocity: d x / d sigma there, of the same shape.
            index: which step each takes, (batch,) int64 from 0 to n - 1.

        Returns:
            Samples at `sigmas_prev[index]`, (batch, …).
        """
        change = (self.sigmas_prev - self.sigmas)[index].to(x.dtype)
        return x + change.view(-1, *[1] * (x.dim() - 1)) * velocity

    @torch.no_grad()
    def sample(self, velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor) -> Tensor:
        """All steps, one after the other.

        Args:
            velocity: (x (batch, …), sigma (batch,)) -> d x / d sigma.
            noise: standard normal, (batch, …).

        Returns:
            Samples at sigma = 0, (batch, …).
        """
        x = noise
        for step in reversed(range(len(self.sigmas))):
            index = torch.full((len(x),), step, device=x.device)
            x = self.step(x, velocity(x, self.sigmas[index].to(x.dtype)), index)
        return x
