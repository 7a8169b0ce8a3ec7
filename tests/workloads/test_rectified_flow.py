"""The path from noise to data, and the times that training takes it at."""

from __future__ import annotations

import math

import pytest
import torch

from fedwan.workloads.flow import draw_sigma, flow_sigmas, interpolate, shift_sigma

DATA, NOISE = torch.randn(2, 5, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def draw(times: str, shift: float = 1.0, num: int = 20_000) -> torch.Tensor:
    return draw_sigma(num, torch.Generator().manual_seed(0), times, shift)


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


def test_levels_are_logit_normal() -> None:
    sigma = draw("logit_normal")
    logits = torch.logit(sigma)
    assert 0 < float(sigma.min()) <= float(sigma.max()) < 1
    assert float(logits.mean()) == pytest.approx(0, abs=0.03)
    assert float(logits.std()) == pytest.approx(1, abs=0.03)
    # Of the levels themselves: mean 1/2, standard deviation 0.208.
    assert float(sigma.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(sigma.std()) == pytest.approx(0.208, abs=0.005)


def test_levels_can_be_uniform() -> None:
    sigma = draw("uniform")
    assert 0 <= float(sigma.min()) <= float(sigma.max()) < 1
    assert float(sigma.mean()) == pytest.approx(1 / 2, abs=0.01)
    assert float(sigma.std()) == pytest.approx(12**-0.5, abs=0.005)


@pytest.mark.parametrize("times", ["logit_normal", "uniform"])
def test_shifted_levels_are_those_of_no_shift_moved_towards_the_noise(times: str) -> None:
    plain, shifted = draw(times), draw(times, shift=3.0)
    assert torch.equal(shifted, shift_sigma(plain, 3.0))
    # A shift of s adds ln s to the logit.
    torch.testing.assert_close(
        shifted.double().logit(), plain.double().logit() + math.log(3), rtol=0, atol=1e-2
    )


@pytest.mark.parametrize("shift", [0.1, 0.7, 1.0, 1.15, 3.0, 12.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_shift_is_that_of_diffusers_and_keeps_both_ends(
    shift: float, dtype: torch.dtype
) -> None:
    sigma = torch.linspace(0, 1, 11, dtype=dtype)
    shifted = shift_sigma(sigma, shift)
    assert float(shifted[0]) == 0.0 and float(shifted[-1]) == 1.0
    torch.testing.assert_close(shifted, shift * sigma / (1 + (shift - 1) * sigma))
    assert float(shifted[5]) == pytest.approx(shift / (shift + 1))  # the middle


def test_no_shift_leaves_every_bit() -> None:
    for dtype in (torch.float32, torch.float64):
        sigma = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=dtype)
        assert torch.equal(shift_sigma(sigma, 1.0), sigma)
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw("logit_normal"), logits.sigmoid())


@pytest.mark.parametrize("num", [1, 3, 20, 1000])
def test_the_schedule_is_of_equal_steps_up_to_one(num: int) -> None:
    sigmas = flow_sigmas(num)
    assert sigmas.tolist() == [step / num for step in range(1, num + 1)]
