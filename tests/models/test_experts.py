"""Experts: one network for each site, of which one makes each sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedwan.errors import ConfigError
from fedwan.models.experts import Experts, build_experts, draw_experts, forward_drawn, train_own
from fedwan.workloads.precision import _blocks


class Adding(nn.Module):
    """x + its own number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


def alike(num: int) -> torch.Tensor:
    """Labels of so many samples of one class."""
    return torch.zeros(num, dtype=torch.int64)


def experts(*num_samples: int | list[int]) -> Experts:
    """With so many samples at each site, or so many of each class."""
    counts = [[num] if isinstance(num, int) else num for num in num_samples]
    made = Experts(Adding(0.0), len(counts), len(counts[0]))
    for index, expert in enumerate(made.experts.values()):
        nn.init.constant_(expert.number, float(index))
    made.num_samples.copy_(torch.tensor(counts))
    return made


def test_experts_begin_alike_and_one_of_them_is_trained_here() -> None:
    made = build_experts(nn.Linear(2, 2), 3)
    assert isinstance(made, Experts)
    first = made.experts["0"].weight
    assert all(torch.equal(expert.weight, first) for expert in made.experts.values())
    train_own([made], 1, lambda num: torch.tensor([10]))
    made(torch.ones(1, 2)).sum().backward()
    have_gradients = [expert.weight.grad is not None for expert in made.experts.values()]
    assert have_gradients == [False, True, False]


def test_samples_are_drawn_by_how_many_each_site_has() -> None:
    drawn = draw_experts(experts(100, 300, 600), alike(20_000), seed=0)
    shares = drawn.bincount() / len(drawn)
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.3, 0.6]), atol=0.015, rtol=0)
    assert torch.equal(drawn, draw_experts(experts(100, 300, 600), alike(20_000), seed=0))
    assert not torch.equal(drawn, draw_experts(experts(100, 300, 600), alike(20_000), seed=1))
    # They count alike where one of them does not know.
    drawn = draw_experts(experts(0, 300), alike(20_000), seed=0)
    assert abs(float(drawn.double().mean()) - 0.5) < 0.02
    # A network of all sites is its own.
    network = Adding(1.0)
    assert build_experts(network, 0) is network
    drawn = draw_experts(network, alike(3), seed=0)
    assert forward_drawn(network, drawn, torch.zeros(3)).tolist() == [1.0] * 3


def test_a_class_is_asked_of_those_that_have_it() -> None:
    made = experts([10, 30, 0], [0, 10, 0], [5, 0, 0])
    labels = torch.arange(3).repeat(20_000)
    drawn = draw_experts(made, labels, seed=0)
    shares = torch.stack([drawn[labels == label].bincount(minlength=3) for label in range(3)])
    expected = torch.tensor([[2 / 3, 0, 1 / 3], [3 / 4, 1 / 4, 0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(shares / 20_000, expected, atol=0.02, rtol=0)


def test_of_networks_that_are_told_the_class_samples_must_be_counted() -> None:
    with pytest.raises(ConfigError, match="how many samples of each class .* is not known"):
        train_own([Experts(Adding(0.0), 2, 3)], 0, alike)


@pytest.mark.parametrize("drawn", [[2, 0, 1, 2, 0], [1, 1, 1, 1, 1], [2, 2, 0, 0, 2]], ids=str)
def test_each_sample_keeps_its_place_and_its_expert(drawn: list[int]) -> None:
    made = forward_drawn(experts(1, 1, 1), torch.tensor(drawn), 10.0 * torch.arange(5))
    assert made.tolist() == [10.0 * place + index for place, index in enumerate(drawn)]
    asked_twice = forward_drawn(experts(1, 1, 1), torch.tensor(drawn), torch.zeros(10))
    assert asked_twice.tolist() == 2 * drawn


def test_what_is_computed_again_are_the_blocks_of_a_network_not_whole_experts() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

    assert len(list(_blocks(Experts(made(), 4)))) == 4 * len(list(_blocks(made()))) == 12
