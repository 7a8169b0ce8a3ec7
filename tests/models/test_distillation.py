"""Heads on a frozen network's features, and a network with its moving average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedwan.models.distillation import FeatureHeads, Followed
from fedwan.rng import seeded_init


def test_each_block_has_a_head_and_each_token_a_logit() -> None:
    heads = FeatureHeads(width=6, blocks=3, hidden=4)
    assert heads([torch.randn(5, 6)] * 3).shape == (5, 3)
    assert heads([torch.randn(5, 7, 6)] * 3).shape == (5, 3, 7)
    with pytest.raises(ValueError):
        heads([torch.randn(5, 6)] * 2)


def followed(half_life: float) -> Followed:
    with seeded_init(0):
        return Followed(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), half_life)


def move(network: Followed, by: float) -> None:
    with network.following(), torch.no_grad():
        for index, param in enumerate(network.parameters()):
            param.add_(by * (index + 1))


def average(network: Followed) -> list[Tensor]:
    lags = network.buffers()
    return [p.detach() + lag for p, lag in zip(network.parameters(), lags, strict=True)]


def test_the_target_is_the_moving_average_of_the_parameters() -> None:
    network, decay = followed(half_life=2.0), 0.5**0.5
    expected = [p.detach().clone() for p in network.parameters()]
    for step in range(6):
        move(network, 0.1 * (step - 2))
        for value, param in zip(expected, network.parameters(), strict=True):
            value.lerp_(param.detach(), 1 - decay)
    torch.testing.assert_close(average(network), expected)
    x = torch.randn(5, 3)
    found = network.target(x)
    assert not found.requires_grad
    with torch.no_grad():
        for param, value in zip(network.parameters(), expected, strict=True):
            param.copy_(value)
    torch.testing.assert_close(network(x), found)


def test_a_merge_takes_the_target_along() -> None:
    network = followed(half_life=5.0)
    move(network, 0.3)
    before = average(network)
    with torch.no_grad():
        for param in network.parameters():
            param.add_(1.0)
    torch.testing.assert_close(average(network), [value + 1.0 for value in before])


def test_a_step_that_fails_leaves_no_half_made_lag() -> None:
    network = followed(half_life=3.0)
    with pytest.raises(RuntimeError), network.following():
        raise RuntimeError
    assert not any(bool(lag.any()) for lag in network.buffers())
