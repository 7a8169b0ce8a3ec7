"""The path from noise to data: times, steps, labels and guidance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedwan.workloads.flow import (
    EulerSolver,
    Phases,
    draw_sigma,
    flow_sigmas,
    guide,
    interpolate,
    jump,
    renoise,
    shift_sigma,
)

DATA, NOISE = torch.randn(2, 5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
NULL = 10


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_samples_go_from_data_to_noise_each_at_its_own_level() -> None:
    x, target = interpolate(DATA, NOISE, torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))
    assert torch.equal(x[::2], DATA[::2]) and torch.equal(x[1::2], NOISE[1::2])
    low, high = (interpolate(DATA, NOISE, torch.full((5,), level))[0] for level in (0.25, 0.75))
    torch.testing.assert_close((high - low) / 0.5, target)
    assert torch.equal(target, NOISE - DATA)


def test_most_levels_are_in_the_middle_and_a_shift_moves_them_towards_the_noise() -> None:
    sigma = draw_sigma(20_000, generator())
    assert 0 <= float(sigma.min()) <= float(sigma.max()) < 1
    assert (float(sigma.mean()), float(sigma.std())) == pytest.approx((0.5, 0.208), abs=0.01)
    shifted = draw_sigma(20_000, generator(), shift=3.0)
    torch.testing.assert_close(shifted, 3 * sigma / (1 + 2 * sigma))  # as diffusers has it
    ends = shift_sigma(torch.tensor([0.0, 1.0]), 12.7)
    assert ends.tolist() == [0, 1] and torch.equal(shift_sigma(sigma, 1.0), sigma)


@pytest.mark.parametrize(
    ("num_timesteps", "num_steps"), [(1000, 1), (1000, 50), (1000, 48), (1000, 999), (10, 3)]
)
def test_steps_go_from_pure_noise_to_the_data_without_a_gap(
    num_timesteps: int, num_steps: int
) -> None:
    solver = EulerSolver(flow_sigmas(num_timesteps, 3.0), num_steps)
    assert len(solver.sigmas) == len(solver.timesteps) == num_steps
    assert float(solver.sigmas[-1]) == 1.0 and float(solver.sigmas_prev[0]) == 0.0
    assert torch.equal(solver.sigmas[:-1], solver.sigmas_prev[1:])
    assert torch.equal(solver.timesteps[:-1], solver.timesteps_prev[1:])
    lengths, even = solver.timesteps - solver.timesteps_prev, num_timesteps / num_steps
    assert math.floor(even) <= int(lengths.min()) <= int(lengths.max()) <= math.ceil(even)
    if num_timesteps % num_steps == 0:  # as in the paper's scripts, which count from 0
        indices = torch.arange(1, num_steps + 1) * (num_timesteps // num_steps) - 1
        assert torch.equal(solver.timesteps - 1, indices)


@pytest.mark.parametrize(("num_timesteps", "num_steps"), [(1, 1), (20, 20), (1000, 48)])
def test_a_constant_velocity_is_followed_exactly(num_timesteps: int, num_steps: int) -> None:
    levels: list[float] = []

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        assert sigma.shape == (5,) and sigma.dtype == x.dtype
        levels.append(float(sigma[0]))
        return (NOISE - DATA).requires_grad_()

    solver = EulerSolver(flow_sigmas(num_timesteps), num_steps)
    before = NOISE.clone()
    samples = solver.sample(velocity, NOISE)
    torch.testing.assert_close(samples, DATA, atol=1e-6 * (1 + num_steps), rtol=0)
    assert levels == solver.sigmas.float().flip(0).tolist()
    assert torch.equal(NOISE, before) and not samples.requires_grad


@pytest.mark.parametrize("guidance", [0.0, 1.0, 7.5])
def test_guidance_goes_from_the_null_class_to_the_label_and_beyond(guidance: float) -> None:
    x, sigma, labels = torch.randn(4, 2), torch.rand(4), torch.arange(4)
    sizes: list[int] = []

    def velocity(x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """Its value tells all that it was asked."""
        sizes.append(len(x))
        return (x + sigma[:, None]) * (labels[:, None] + 1)

    guided = guide(velocity, labels, NULL, guidance)(x, sigma)
    assert sizes == [4 if guidance == 1 else 8]
    with_label, without = (velocity(x, sigma, y) for y in (labels, torch.full_like(labels, NULL)))
    torch.testing.assert_close(guided, without + guidance * (with_label - without))


@pytest.mark.parametrize(("steps", "phases"), [(6, 2), (20, 4), (7, 3), (5, 5), (4, 1)])
def test_every_solver_step_lies_in_one_phase(steps: int, phases: int) -> None:
    made = Phases(flow_sigmas(steps, 3.0), phases)
    assert len(set(made.edges.tolist())) == phases
    assert float(made.edges[0]) == 0 and float(made.tops[-1]) == 1
    assert bool((made.edges <= made.solver.sigmas_prev).all())
    assert bool((made.solver.sigmas <= made.tops).all())
    # Edges are levels of the solver's own, to the bit: a path can end there.
    assert set(made.edges.tolist()) <= set(made.solver.sigmas_prev.tolist())
    torch.testing.assert_close(made.tops.unique(), made.jumps.sigmas)


def test_a_jump_along_the_true_velocity_arrives() -> None:
    data, noise = torch.randn(4, 2), torch.randn(4, 2)
    sigma, edge = torch.tensor([0.9, 0.5, 0.4, 1.0]), torch.tensor([0.5, 0.0, 0.3, 0.0])

    def at(level: torch.Tensor) -> torch.Tensor:
        return level[:, None] * noise + (1 - level[:, None]) * data

    torch.testing.assert_close(jump(at(sigma), noise - data, sigma, edge), at(edge))


@pytest.mark.parametrize(("sigma", "higher"), [(0.0, 0.6), (0.3, 0.3), (0.3, 0.8), (0.5, 1.0)])
def test_noised_further_samples_are_as_if_noised_at_once(sigma: float, higher: float) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 200_000, 1, generator=generator)
    levels = torch.full((200_000,), sigma), torch.full((200_000,), higher)
    x = renoise(sigma * first + (1 - sigma) * 2.0, second, *levels)
    assert float(x.mean()) == pytest.approx((1 - higher) * 2.0, abs=0.01)
    assert float(x.std()) == pytest.approx(higher, abs=0.01)
    if sigma == higher:
        torch.testing.assert_close(x, sigma * first + (1 - sigma) * 2.0)
