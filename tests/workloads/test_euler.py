"""Steps from noise to data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedwan.workloads.flow import EulerSolver, flow_sigmas

DATA, NOISE = torch.randn(2, 5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
ANY_STEPS = pytest.mark.parametrize(
    ("num_timesteps", "num_steps"),
    [(1000, 1), (1000, 50), (1000, 48), (1000, 7), (1000, 999), (1000, 1000), (10, 3), (1, 1)],
)


@ANY_STEPS
@pytest.mark.parametrize("shift", [0.1, 1.0, 3.0])
def test_it_begins_at_pure_noise_and_ends_at_the_data(
    num_timesteps: int, num_steps: int, shift: float
) -> None:
    solver = EulerSolver(flow_sigmas(num_timesteps, shift), num_steps)
    assert float(solver.sigmas[-1]) == 1.0 and float(solver.sigmas_prev[0]) == 0.0
    assert int(solver.timesteps[-1]) == num_timesteps and int(solver.timesteps_prev[0]) == 0


@ANY_STEPS
def test_each_step_begins_where_the_one_above_ends(num_timesteps: int, num_steps: int) -> None:
    solver = EulerSolver(flow_sigmas(num_timesteps), num_steps)
    assert len(solver.sigmas) == len(solver.timesteps) == num_steps
    assert torch.equal(solver.sigmas[:-1], solver.sigmas_prev[1:])
    assert torch.equal(solver.timesteps[:-1], solver.timesteps_prev[1:])
    assert torch.equal(solver.sigmas, solver.timesteps.double() / num_timesteps)
    lengths = solver.timesteps - solver.timesteps_prev
    even = num_timesteps / num_steps
    assert math.floor(even) <= int(lengths.min()) <= int(lengths.max()) <= math.ceil(even)


def test_where_n_divides_t_its_timesteps_are_those_of_the_scripts() -> None:
    num_timesteps, num_steps = 1000, 50
    solver = EulerSolver(flow_sigmas(num_timesteps), num_steps)
    indices = torch.arange(1, num_steps + 1) * (num_timesteps // num_steps) - 1
    assert torch.equal(solver.timesteps - 1, indices)  # theirs count from 0


def test_the_scripts_own_indices_miss_both_ends() -> None:
    """Why the solver does not take them: with 48 of 1000 steps they begin at 0.96."""
    indices = torch.arange(1, 48 + 1) * (1000 // 48) - 1
    sigmas = flow_sigmas(1000)
    assert float(sigmas[indices][-1]) == pytest.approx(0.96)
    assert float(sigmas[0]) == pytest.approx(0.001)  # where they end


def constant(x: Tensor, sigma: Tensor) -> Tensor:
    return NOISE - DATA


@pytest.mark.parametrize(("num_timesteps", "num_steps"), [(1, 1), (20, 20), (1000, 48), (1000, 50)])
def test_a_constant_velocity_is_followed_exactly(num_timesteps: int, num_steps: int) -> None:
    samples = EulerSolver(flow_sigmas(num_timesteps), num_steps).sample(constant, NOISE)
    torch.testing.assert_close(samples, DATA, atol=1e-6 * (1 + num_steps), rtol=0)


def test_a_linear_velocity_is_followed_to_first_order() -> None:
    noise = torch.ones(1, 1, dtype=torch.float64)

    def error(num_steps: int) -> float:
        solver = EulerSolver(flow_sigmas(num_steps), num_steps)
        return float(solver.sample(lambda x, sigma: x, noise)) - math.exp(-1)  # dx / d sigma = x

    errors = [error(num_steps) for num_steps in (10, 20, 40, 80)]
    ratios = [coarse / fine for coarse, fine in zip(errors, errors[1:], strict=False)]
    assert all(error < 0 for error in errors)
    assert ratios == pytest.approx([2, 2, 2], abs=0.06)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 20, 1000])
def test_equal_steps_are_taken_at_exact_levels(num_steps: int) -> None:
    levels: list[float] = []

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        assert sigma.shape == (5,) and sigma.dtype == x.dtype
        levels.append(float(sigma[0]))
        return constant(x, sigma)

    EulerSolver(flow_sigmas(num_steps), num_steps).sample(velocity, NOISE)
    exact = torch.tensor([(num_steps - step) / num_steps for step in range(num_steps)])
    assert torch.equal(torch.tensor(levels), exact)


def test_every_sample_may_take_a_step_of_its_own() -> None:
    solver = EulerSolver(flow_sigmas(1000, shift=3.0), 4)
    index = torch.tensor([3, 0, 2, 1, 3])
    stepped = solver.step(NOISE, DATA, index)
    for sample, step in enumerate(index.tolist()):
        change = float(solver.sigmas_prev[step] - solver.sigmas[step])
        torch.testing.assert_close(stepped[sample], NOISE[sample] + change * DATA[sample])
    assert stepped.dtype == NOISE.dtype


def test_sampling_keeps_no_graph_and_leaves_the_noise_alone() -> None:
    weight = torch.ones((), requires_grad=True)
    before = NOISE.clone()
    samples = EulerSolver(flow_sigmas(3), 3).sample(lambda x, sigma: weight * x, NOISE)
    assert not samples.requires_grad
    assert torch.equal(NOISE, before)


def test_a_step_carries_gradients_for_who_trains_through_it() -> None:
    velocity = DATA.clone().requires_grad_()
    solver = EulerSolver(flow_sigmas(4), 4)
    solver.step(NOISE, velocity, torch.zeros(5, dtype=torch.int64)).sum().backward()
    assert velocity.grad is not None
    assert torch.equal(velocity.grad, torch.full_like(DATA, -0.25))


@pytest.mark.parametrize("num_steps", [0, 11])
def test_more_steps_than_timesteps_and_none_at_all_are_refused(num_steps: int) -> None:
    with pytest.raises(ValueError, match=f"num_steps = {num_steps} .* choose 1 to 10"):
        EulerSolver(flow_sigmas(10), num_steps)


@pytest.mark.parametrize(
    "sigmas",
    [
        flow_sigmas(10).flip(0),  # as diffusers lists them
        flow_sigmas(10)[:-1],
        torch.cat([torch.zeros(1), flow_sigmas(10)]),
        torch.tensor([0.5, 0.5, 1.0]),
        torch.tensor([0.5, math.nan, 1.0]),
    ],
    ids=["falling", "short of noise", "with the data", "twice", "nan"],
)
def test_levels_that_do_not_rise_to_one_are_refused(sigmas: Tensor) -> None:
    with pytest.raises(ValueError, match="rise to exactly 1"):
        EulerSolver(sigmas, 2)
