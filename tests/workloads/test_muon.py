"""Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedwan.state import state_of
from fedwan.workloads.optim import Muon

LR, BETAS, DECAY = 0.02, (0.8, 0.99), 0.1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 8), nn.Linear(8, 2))


def follow(params: list[Tensor], *optimizers: torch.optim.Optimizer, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def test_matrices_step_as_torchs_muon_and_the_rest_as_its_adamw() -> None:
    ours, theirs = network(), network()
    params: list[Tensor] = list(theirs.parameters())
    matrices = torch.optim.Muon(
        [param for param in params if param.ndim == 2],
        lr=LR,
        momentum=BETAS[0],
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = torch.optim.AdamW(
        [param for param in params if param.ndim != 2], lr=LR, betas=BETAS, weight_decay=DECAY
    )
    follow(params, matrices, rest)
    follow(list(ours.parameters()), Muon(list(ours.parameters()), LR, BETAS, DECAY))
    networks = (state_of({"net": module}) for module in (ours, theirs, network()))
    for one, other, first in zip(*(state.values() for state in networks), strict=True):
        assert torch.equal(one, other) and not torch.equal(one, first)


def test_a_gradient_of_nothing_moves_nothing_and_no_gradient_does_not_step() -> None:
    still, moving = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    optimizer = Muon([still, moving], LR, BETAS, DECAY)
    moving.grad = torch.zeros(3, 4)
    optimizer.step()
    assert torch.equal(still, torch.ones(3, 4)) and still not in optimizer.state
    torch.testing.assert_close(moving.detach(), torch.full((3, 4), 1 - LR * DECAY))


def test_settings_that_change_and_copies_hold_for_both_kinds_of_steps() -> None:
    params = list(network().parameters())
    optimizer = Muon(params, LR, BETAS, DECAY)
    follow(list(params), optimizer)
    twin = copy.deepcopy(optimizer)
    for one in (optimizer, twin):
        one.param_groups[0] |= {"betas": (0.5, 0.7), "weight_decay": 0.0}
        follow(one.param_groups[0]["params"], one)
    for param, other in zip(params, twin.param_groups[0]["params"], strict=True):
        assert param is not other and torch.equal(param, other)


def test_a_rate_that_is_set_later_holds_for_every_parameter() -> None:
    params = list(network().parameters())
    before = [param.detach().clone() for param in params]
    optimizer = Muon(params, LR, BETAS, DECAY)
    optimizer.param_groups[0]["lr"] = 0.0
    follow(list(params), optimizer)
    assert all(torch.equal(param, b) for param, b in zip(params, before, strict=True))
    optimizer.param_groups[0]["lr"] = LR
    follow(list(params), optimizer)
    assert not any(torch.equal(param, b) for param, b in zip(params, before, strict=True))


def test_a_matrix_has_one_moment() -> None:
    module = network()
    optimizer = Muon(list(module.parameters()), LR, BETAS, DECAY)
    follow(list(module.parameters()), optimizer, steps=1)
    for param in module.parameters():
        fields = {"momentum_buffer"} if param.ndim == 2 else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[param]) == fields


def test_networks_without_matrices_or_with_nothing_else_are_stepped() -> None:
    for module in (nn.Conv2d(1, 2, 3), nn.Linear(3, 2, bias=False)):
        before = copy.deepcopy(module)
        follow(list(module.parameters()), Muon(list(module.parameters()), LR, BETAS, 0.0))
        for param, old in zip(module.parameters(), before.parameters(), strict=True):
            assert not torch.equal(param, old)
