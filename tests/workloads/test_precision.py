"""Blocks that are computed twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedwan.errors import ConfigError
from fedwan.state import state_of
from fedwan.workloads.precision import recompute_blocks


def gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Of a loss with a penalty on the input's gradient, which needs a second derivative."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return torch.autograd.grad(out.square().mean() + slope.square().mean(), module.parameters())


def test_recomputed_blocks_run_twice_and_change_no_gradient_name_or_statistic() -> None:
    plain = nn.Sequential(
        nn.Linear(4, 8),
        nn.Sequential(nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 8), nn.Dropout(0.3)),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
    )
    again = copy.deepcopy(plain)
    recompute_blocks([again])
    runs: list[str] = []
    again[1][2].register_forward_pre_hook(lambda *_: runs.append("block"))  # type: ignore[index]
    x = torch.randn(16, 4)
    expected, found = gradients(plain, x), gradients(again, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(runs) > 1
    states = [state_of({"net": module}) for module in (plain, again)]
    assert states[0].keys() == states[1].keys()
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert int(states[1]["net/1.0.num_batches_tracked"]) == 1
    with pytest.raises(ConfigError, match="site.recompute = True has no effect: no network"):
        recompute_blocks([nn.Sequential(nn.Linear(2, 2), nn.Tanh())])
