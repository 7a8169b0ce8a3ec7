"""Phases of a student, and what it learns in them."""

from __future__ import annotations

import pytest
import torch

from fedwan.workloads.flow import Phases, consistency_loss, flow_sigmas, jump, renoise


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


def test_the_loss_is_the_distance_and_is_smooth_where_there_is_none() -> None:
    made = torch.tensor([[1.0, -2.0]], requires_grad=True)
    loss = consistency_loss(made, torch.zeros(1, 2))
    assert loss.item() == pytest.approx(1.5, abs=2e-3)
    same = torch.zeros(1, 2, requires_grad=True)
    consistency_loss(same, torch.zeros(1, 2)).backward()
    assert same.grad is not None and torch.equal(same.grad, torch.zeros(1, 2))
