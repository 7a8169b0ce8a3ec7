"""Velocity networks."""

from __future__ import annotations

import pytest
import torch

from fedwan.models.velocity import VelocityNetwork, embed_level
from fedwan.workloads.euler import EulerSolver
from fedwan.workloads.rectified_flow import flow_sigmas


@pytest.mark.parametrize("shape", [(1, 8, 8), (2,)], ids=str)
def test_velocities_have_the_shape_of_the_samples(shape: tuple[int, ...]) -> None:
    network = VelocityNetwork(shape, width=16, depth=2)
    assert network(torch.randn(5, *shape), torch.rand(5)).shape == (5, *shape)


@pytest.mark.parametrize("shape", [(1, 8, 8), (2,)], ids=str)
def test_before_training_the_data_are_taken_for_zero(shape: tuple[int, ...]) -> None:
    network = VelocityNetwork(shape, width=16, depth=2)
    x = torch.randn(3, *shape)
    sigma = torch.tensor([1.0, 0.5, 0.01])
    expected = x / torch.tensor([1.0, 0.5, 0.05]).view(-1, *[1] * len(shape))
    torch.testing.assert_close(network(x, sigma), expected)


def test_sampling_in_twenty_steps_ends_at_the_predicted_data() -> None:
    network = VelocityNetwork((2,), width=16, depth=2)
    place = torch.tensor([0.3, -0.2])
    network.write.bias.data.copy_(place)
    samples = EulerSolver(flow_sigmas(20), 20).sample(network, torch.randn(5, 2))
    torch.testing.assert_close(samples, place.expand(5, 2), atol=1e-5, rtol=0)


def test_the_level_changes_the_velocity_once_trained() -> None:
    network = VelocityNetwork((2,), width=16, depth=1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    x, sigma = torch.randn(64, 2), torch.rand(64) * 0.9 + 0.1
    for _ in range(20):
        optimizer.zero_grad()
        (network(x, sigma) - x * sigma[:, None]).square().mean().backward()
        optimizer.step()
    same = torch.ones(2, 2)
    low, high = same - network(same, torch.tensor([0.2, 0.9])) * torch.tensor([[0.2], [0.9]])
    assert not torch.allclose(low, high)


def test_levels_are_told_apart_and_bounded() -> None:
    embedded = embed_level(torch.linspace(0, 1, 101))
    assert embedded.shape == (101, 64)
    assert float(embedded.abs().max()) <= 1
    distances = torch.cdist(embedded, embedded) + 10 * torch.eye(101)
    assert float(distances.min()) > 0.1
