"""Weights in bf16, the scale of losses, and blocks that are computed twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedwan.app import load_run, load_workload
from fedwan.config import InnerConfig
from fedwan.data import open_shard
from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.state import state_of
from fedwan.workloads.base import keep_local
from fedwan.workloads.optim import build_optimizer
from fedwan.workloads.precision import (
    LossScale,
    hold_in_half,
    keep_squares_in_full,
    recompute_blocks,
)

CPU = torch.device("cpu")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 2))


def test_it_computes_what_rounded_weights_compute_and_norms_stay_in_fp32() -> None:
    half, rounded = network(), network()
    hold_in_half(half)
    assert state_of({"net": half}).keys() == state_of({"net": rounded}).keys()
    for name, value in state_of({"net": half}).items():
        expected = torch.float32 if name.startswith("net/1.") else torch.bfloat16
        assert not value.is_floating_point() or value.dtype == expected, name
    with torch.no_grad():
        for param in (*rounded[0].parameters(), *rounded[3].parameters()):
            param.copy_(param.bfloat16())
    x = torch.randn(16, 4)
    out = half(x)
    torch.testing.assert_close(out.float(), rounded(x), rtol=3e-2, atol=3e-2)
    out.float().square().mean().backward()
    assert half[0].weight.grad is not None and half[0].weight.grad.dtype == torch.bfloat16
    other = copy.deepcopy(half)  # computes with its own weights
    with torch.no_grad():
        for param in other[3].parameters():
            param.zero_()
    assert not other(x).any() and half(x).any()


@pytest.mark.parametrize(
    "words",
    [
        ("workload=flow", "data.name=ring8", "model.width=16", "model.depth=2"),
        ("workload=flow", "model.network=dit", "model.width=16", "site.recompute=true"),
        ("workload=gan", "data.name=ring8", "model.width=8", "model.spectral_norm=true"),
        ("workload=pix2pix", "data.name=photo_edges", "model.width=4", "model.depth=3"),
    ],
    ids=["mlp", "dit", "gan", "pix2pix"],
)
def test_a_recipe_trains_and_samples_with_half_of_the_memory(words: tuple[str, ...]) -> None:
    num_bytes = {}
    for precision in ("32-true", "bf16-true"):
        config = load_run(None, [*words, "data.batch=16", f"site.precision={precision}"])
        workload = load_workload(config.workload).build(config, CPU)
        rng = NamedGenerators(0, "s1")
        stream = open_shard(config.data, 0, 2, 0).loader(16, rng["data"], CPU)
        for _ in range(2):
            losses = workload.step(next(stream), rng, keep_local)
        assert all(torch.isfinite(loss) for loss in losses.values())
        assert workload.sample(4, 0).dtype == torch.float32
        params = [p for n in workload.networks.values() for p in n.parameters()]
        states = [s for o in workload.optimizers.values() for s in o.state.values()]
        moments = [value for state in states for value in state.values() if value.dim()]
        held = [*params, *(p.grad for p in params if p.grad is not None), *moments]
        num_bytes[precision] = sum(value.nbytes for value in held)
    assert num_bytes["bf16-true"] < 0.66 * num_bytes["32-true"]  # batch norm is not halved


def test_squares_of_gradients_fall_again_when_gradients_do() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        param = nn.Parameter(torch.zeros(500, dtype=dtype))
        optimizer = build_optimizer(InnerConfig(lr=0.0, beta2=0.99), [param])
        keep_squares_in_full(optimizer)
        generator = torch.Generator().manual_seed(0)
        for scale in [1.0] * 60 + [0.1] * 300:
            param.grad = (scale * torch.randn(500, generator=generator)).to(dtype)
            optimizer.step()
        squares = optimizer.state[param]["exp_avg_sq"]
        assert squares.dtype == torch.float32
        found.append(float(squares.mean()))
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_it_is_refused_where_weights_have_to_be_in_fp32() -> None:
    half = "site.precision=bf16-true"
    with pytest.raises(ConfigError, match="'bf16-true' does not go with workload 'distill'"):
        load_run(None, ["workload=distill", "model.teacher=/nowhere", half])
    with pytest.raises(ConfigError, match="with strategy 'sync'.*strategy=local_sgd"):
        load_run(None, ["workload=flow", "strategy=sync", half])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_scale_halves_after_one_overflow_and_doubles_after_many_steps(bad: float) -> None:
    scale = LossScale()
    gradient = torch.tensor([3.0, -1e-9]) * scale.factor
    assert scale.unscale([gradient, torch.empty(0)])
    torch.testing.assert_close(gradient, torch.tensor([3.0, -1e-9]))
    assert not scale.unscale([torch.ones(3), torch.tensor([0.0, bad])])
    assert scale.factor == 2.0**16, "other networks' gradients are still to be unscaled by it"
    scale.update(False)
    for _ in range(2000):
        assert scale.factor == 2.0**15
        scale.update(True)
    assert scale.factor == 2.0**16


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
