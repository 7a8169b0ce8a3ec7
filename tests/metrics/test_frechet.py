"""The Frechet distance."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import sqrtm

from fedwan.errors import FedwanError
from fedwan.metrics.frechet import Moments, frechet_between, frechet_distance, moments


def gaussian(mean: list[float], variances: list[float]) -> Moments:
    covariance = torch.diag(torch.tensor(variances, dtype=torch.float64))
    return Moments(torch.tensor(mean, dtype=torch.float64), covariance)


def test_it_agrees_with_the_closed_form_of_axis_aligned_gaussians() -> None:
    a, b = gaussian([0, 1], [4, 9]), gaussian([3, 5], [1, 16])
    # |m|^2 + sum of (standard deviation difference)^2
    assert frechet_distance(a, b) == pytest.approx(9 + 16 + 1 + 1, abs=1e-12)


def test_it_agrees_with_the_matrix_root_for_covariances_that_do_not_commute() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(2, 50, 8, generator=generator, dtype=torch.float64)
    mix = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    a, b = moments(samples[0]), moments(samples[1] @ mix)
    root = torch.from_numpy(sqrtm((a.covariance @ b.covariance).numpy()).real)
    expected = (a.mean - b.mean).square().sum() + (a.covariance + b.covariance - 2 * root).trace()
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-9)


def test_it_is_symmetric_and_zero_for_the_same_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100, 5, generator=generator)
    assert frechet_between(a, b) == pytest.approx(frechet_between(b, a), rel=1e-12)
    assert frechet_between(a, a) == pytest.approx(0, abs=1e-9)


def test_a_singular_covariance_does_no_harm() -> None:
    flat = torch.zeros(100, 4)
    flat[:, 0] = torch.linspace(-1, 1, 100)
    assert frechet_between(flat, flat + 1) == pytest.approx(4, rel=1e-9)


def test_small_samples_of_one_distribution_lie_further_apart_than_large_ones() -> None:
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    assert frechet_between(x[:100], x[100:200]) > 5 * frechet_between(x[:2000], x[2000:])


def test_moments_are_those_of_the_sample() -> None:
    x = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    found = moments(x)
    assert found.mean.tolist() == [2.0, 0.0]
    assert found.covariance.tolist() == [[2.0, 0.0], [0.0, 0.0]]


def test_values_that_are_not_finite_are_refused() -> None:
    x = torch.full((4, 2), float("nan"))
    with pytest.raises(FedwanError, match="not finite"):
        frechet_between(x, x)
