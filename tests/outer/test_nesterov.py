"""Outer Nesterov against torch's own."""

from __future__ import annotations

import pytest
import torch

from fedwan.outer import nesterov
from fedwan.state import State


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.5), (0.6, 0.9), (1.0, 0.1)])
def test_agrees_with_torch_over_200_steps(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(64, 8, generator=generator))
    mine = theirs.detach().clone()
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=True)
    transform = nesterov(lr, momentum)
    state = transform.init({"w": mine})
    for _ in range(200):
        # Deltas pull towards zero, so that 200 steps stay of the order of one.
        delta = 0.05 * mine + 0.01 * torch.randn(mine.shape, generator=generator)
        theirs.grad = delta.clone()
        optimizer.step()
        update, state = transform.update({"w": delta}, state)
        mine = mine + update["w"]
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_without_momentum_is_sgd() -> None:
    delta = {"w": torch.randn(9)}
    transform = nesterov(0.3, 0.0)
    update, _ = transform.update(delta, transform.init(delta))
    assert torch.equal(update["w"], delta["w"] * -0.3)


def test_a_fragment_moves_only_its_own_momentum() -> None:
    params: State = {"a": torch.zeros(2), "b": torch.zeros(2)}
    transform = nesterov(1.0, 0.5)
    _, state = transform.update({"a": torch.ones(2)}, transform.init(params))
    assert list(state) == ["momentum:a"]
