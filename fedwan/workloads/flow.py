"""Rectified flow (Liu et al. 2022): noised samples to train on, and Euler steps to sample with.

With noise level sigma from 0 (data) to 1 (noise), in the convention of diffusers:

    x_sigma = sigma * noise + (1 - sigma) * data        target = d x / d sigma = noise - data

Times are drawn as in Esser et al. 2024 (2403.03206, section 3.1 and equation 23). The solver is
that of phased consistency models (Wang et al. 2024, 2405.18407), which takes n of a teacher's T
timesteps; unlike theirs it starts at pure noise and ends at the data for any n and T:

    t_k = round(k T / n)        x(t_k-1) = x(t_k) + (sigma(t_k-1) - sigma(t_k)) v,   k = n … 1

Classifier-free guidance (Ho & Salimans 2022) makes samples follow their labels more closely. The
network learns the velocity without labels, too, by a null class, one above the last:

    v = v_null + guidance * (v_label - v_null)

Phased consistency: a teacher's n solver steps are dealt into m phases. A student learns one jump
from anywhere in a phase down to its edge s, where it must arrive at the same place from
neighbouring levels of the teacher's path:

    f(x, sigma) = x + (s - sigma) v(x, sigma)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedwan.models.layers import at_once, clamp_images
from fedwan.rng import derive_seed

_HUBER = 1e-3  # below it the loss is square, as in the scripts of phased consistency


def draw_sigma(num: int, generator: torch.Generator, shift: float = 1.0) -> Tensor:
    """Noise levels to train at, (num,) in [0, 1), from a generator on the CPU.

    The sigmoid of a standard normal (equation 19 with m = 0, s = 1): most work goes to the middle
    of the way. For `shift` see `shift_sigma`.
    """
    return shift_sigma(torch.randn(num, generator=generator).sigmoid(), shift)


def flow_sigmas(num: int, shift: float = 1.0) -> Tensor:
    """A schedule of equal steps, shifted: (num,) float64, from above 0 to exactly 1."""
    # Quotients, not differences: every level is the nearest number to k / num.
    return shift_sigma(torch.arange(1, num + 1, dtype=torch.float64) / num, shift)


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Noise levels moved towards the noise by a shift above 1: s sigma / (1 + (s - 1) sigma).

    Large images need more noise to be destroyed, hence a shift of 3 or so (equation 23).
    """
    # The denominator, so written, leaves sigma = 1 at exactly 1, and all as it is where shift = 1.
    return shift * sigma / (shift * sigma + (1 - sigma))


def interpolate(data: Tensor, noise: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """x_sigma and its target velocity, both like `data` and `noise`, (batch, …); sigma (batch,)."""
    sigma = _per_sample(sigma, data)
    return sigma * noise + (1 - sigma) * data, noise - data


def _per_sample(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 1))


class EulerSolver:
    """n of T steps from noise to data; step n - 1 starts at the noise, step 0 ends at the data.

    `sigmas` (T,) are the levels of timesteps 1 … T, as of `flow_sigmas`. `timesteps` and `sigmas`,
    (n,) int64 and float64, are where each step starts, `timesteps_prev` and `sigmas_prev` its end.
    """

    def __init__(self, sigmas: Tensor, num_steps: int | None = None) -> None:
        total = len(sigmas)
        num_steps = num_steps or total
        assert 1 <= num_steps <= total
        # Rounded half up: distinct since n <= T, and 0 and T at the ends.
        ends = [(2 * k * total + num_steps) // (2 * num_steps) for k in range(num_steps + 1)]
        levels = torch.cat([sigmas.new_zeros(1), sigmas]).double()
        timesteps = torch.tensor(ends, device=sigmas.device)
        self.timesteps, self.timesteps_prev = timesteps[1:], timesteps[:-1]
        self.sigmas, self.sigmas_prev = levels[timesteps[1:]], levels[timesteps[:-1]]

    def step(self, x: Tensor, velocity: Tensor, index: Tensor) -> Tensor:
        """Samples at `sigmas_prev[index]`, (batch, …), from x at `sigmas[index]`.

        `velocity` is d x / d sigma there; `index` the step that each sample takes, (batch,) int64.
        """
        change = (self.sigmas_prev - self.sigmas)[index].to(x.dtype)
        return x + _per_sample(change, x) * velocity

    @torch.no_grad()
    def sample(self, velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor) -> Tensor:
        """Samples (batch, …) from normal noise; `velocity` is (x, sigma) -> d x / d sigma."""
        x = noise
        for step in reversed(range(len(self.sigmas))):
            index = torch.full((len(x),), step, device=x.device)
            x = self.step(x, velocity(x, self.sigmas[index].to(x.dtype)), index)
        return x


def drop_labels(labels: Tensor, share: float, null: int, generator: torch.Generator) -> Tensor:
    """Labels, (batch,) int64, of which about a share is replaced by the null class."""
    dropped = torch.rand(len(labels), generator=generator) < share
    return labels.masked_fill(dropped.to(labels.device, non_blocking=True), null)


def balanced_labels(num: int, num_classes: int, seed: int) -> Tensor:
    """Labels to sample, (num,) int64: each class once, in random order, then each once again."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "labels"))
    turns = range(-(-num // num_classes))
    order = [torch.randperm(num_classes, generator=generator) for _ in turns]
    return torch.cat(order)[:num] if order else torch.empty(0, dtype=torch.int64)


def guide(
    velocity: Callable[..., Tensor], labels: Tensor, null: int, guidance: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, sigma) -> d x / d sigma that leads to samples of these labels, (batch,) int64.

    `velocity` is told (x, sigma, labels). A `guidance` of 1 takes the labels' own velocity, 0 that
    of the null class; every other value takes both, at twice the cost.
    """
    if guidance == 1:
        return lambda x, sigma: velocity(x, sigma, labels)
    both = torch.cat([labels, torch.full_like(labels, null)])

    def guided(x: Tensor, sigma: Tensor) -> Tensor:
        twice = x.repeat(2, *[1] * (x.dim() - 1))
        v_label, v_null = velocity(twice, sigma.repeat(2), both).chunk(2)
        return v_null + guidance * (v_label - v_null)

    return guided


@torch.no_grad()
def sample_flow(
    velocity: Callable[..., Tensor],
    solver: EulerSolver,
    shape: tuple[int, ...],
    labels: Tensor,
    seed: int,
    num_classes: int = 0,
    guidance: float = 1.0,
    drawn: Tensor | None = None,
) -> Tensor:
    """Samples from fixed noise, the same for all networks, (num, *shape); images within [-1, 1].

    With `num_classes` the `velocity` is told `labels`, (num,) int64, too; where there are any,
    those of `drawn`, (num,), before all else. Large images are made in parts, as there is room.
    """
    device = solver.sigmas.device
    generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
    noise = torch.randn(len(labels), *shape, generator=generator).to(device)
    made = []
    for part in torch.split(torch.arange(len(labels)), at_once(shape)):
        told = velocity if drawn is None else partial(velocity, drawn[part])
        if num_classes:
            told = guide(told, labels[part].to(device), num_classes, guidance)
        made.append(solver.sample(told, noise[part.to(device)]))
    return clamp_images(torch.cat(made))


class Phases:
    """The levels of n solver steps, `sigmas` (n,), and of m phases over them.

    `solver` takes the n steps, `jumps` one per phase; `edges` and `tops`, (n,) float64, are where
    the phase of each solver step ends and starts, at levels of the n.
    """

    def __init__(self, sigmas: Tensor, num_phases: int) -> None:
        self.solver = EulerSolver(sigmas)
        self.jumps = EulerSolver(sigmas, num_phases)
        # The phase of the step from timestep i + 1 to i: the first that starts above i.
        phase = torch.searchsorted(self.jumps.timesteps, self.solver.timesteps_prev, right=True)
        self.edges, self.tops = self.jumps.sigmas_prev[phase], self.jumps.sigmas[phase]


def jump(x: Tensor, velocity: Tensor, sigma: Tensor, edge: Tensor) -> Tensor:
    """Samples at `edge`, (batch, …), by one straight step from `sigma`, both (batch,)."""
    return x + _per_sample(edge - sigma, x) * velocity


def renoise(x: Tensor, noise: Tensor, sigma: Tensor, higher: Tensor) -> Tensor:
    """Samples of one noise level, (batch, …), as samples of a `higher` one; both (batch,), below 1.

    a x + b noise with a = (1 - higher) / (1 - sigma) and a^2 sigma^2 + b^2 = higher^2.
    """
    share = (1 - higher) / (1 - sigma)
    rest = (higher.square() - (share * sigma).square()).clamp(min=0).sqrt()
    return _per_sample(share, x) * x + _per_sample(rest, x) * noise


def consistency_loss(made: Tensor, target: Tensor) -> Tensor:
    """Pseudo-Huber loss of every value, a scalar: about |made - target|, square where tiny."""
    return ((made - target).square() + _HUBER**2).sqrt().mean() - _HUBER
