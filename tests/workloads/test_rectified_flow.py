"""The path from noise to data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.workloads.rectified_flow import draw_sigma, euler_sample, interpolate

DATA, NOISE = torch.randn(2, 5, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def test_level_one_is_noise_and_level_zero_is_data() -> None:
    assert torch.equal(interpolate(DATA, NOISE, torch.ones(5))[0], NOISE)
    assert torch.equal(interpolate(DATA, NOISE, torch.zeros(5))[0], DATA)


def test_the_target_is_the_derivative_along_the_path() -> None:
    low, target = interpolate(DATA, NOISE, torch.full((5,), 0.25))
    high, _ = interpolate(DATA, NOISE, torch.full((5,), 0.75))
    torch.testing.assert_close((high - low) / 0.5, target)
    assert torch.equal(target, NOISE - DATA)


def test_each_sample_has_its_own_level() -> None:
    x, _ = interpolate(DATA, NOISE, torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))
    assert torch.equal(x[::2], DATA[::2])
    assert torch.equal(x[1::2], NOISE[1::2])


@pytest.mark.parametrize("num_steps", [1, 2, 7, 20, 1000])
def test_euler_starts_at_pure_noise_and_ends_at_the_data(num_steps: int) -> None:
    levels: list[float] = []

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        assert sigma.shape == (5,)
        levels.append(float(sigma[0]))
        if len(levels) == 1:
            assert torch.equal(x, NOISE)
        return NOISE - DATA

    samples = euler_sample(velocity, NOISE, num_steps)
    torch.testing.assert_close(samples, DATA, atol=1e-6 * (1 + num_steps), rtol=0)
    assert levels[0] == 1.0
    assert levels[-1] == pytest.approx(1 / num_steps)
    gaps = torch.tensor([*levels, 0.0]).diff()
    torch.testing.assert_close(gaps, torch.full((num_steps,), -1 / num_steps), atol=1e-6, rtol=0)


def test_euler_keeps_no_graph_and_leaves_the_noise_alone() -> None:
    weight = torch.ones((), requires_grad=True)
    before = NOISE.clone()
    samples = euler_sample(lambda x, sigma: weight * x, NOISE, 3)
    assert not samples.requires_grad
    assert torch.equal(NOISE, before)


def test_levels_are_logit_normal() -> None:
    sigma = draw_sigma(20_000, torch.Generator().manual_seed(0))
    logits = torch.logit(sigma)
    assert 0 < float(sigma.min()) <= float(sigma.max()) < 1
    assert float(logits.mean()) == pytest.approx(0, abs=0.03)
    assert float(logits.std()) == pytest.approx(1, abs=0.03)
