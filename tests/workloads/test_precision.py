"""Half precision: networks whose weights are in bf16, and the scale of losses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedwan.app import load_run, load_workload
from fedwan.data import open_shard
from fedwan.errors import ConfigError, FedwanError
from fedwan.rng import NamedGenerators
from fedwan.state import state_of
from fedwan.workloads.base import keep_local
from fedwan.workloads.precision import LossScale, hold_in_half

CPU = torch.device("cpu")
TRUE = "site.precision=bf16-true"


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


def test_a_copy_computes_with_its_own_weights() -> None:
    half = network()
    hold_in_half(half)
    other = copy.deepcopy(half)
    with torch.no_grad():
        for param in other[3].parameters():
            param.zero_()
    x = torch.randn(16, 4)
    assert not other(x).any() and half(x).any()


@pytest.mark.parametrize(
    "words",
    [
        ("workload=flow", "model.width=16", "model.depth=2"),
        ("workload=flow", "model.network=dit", "model.width=16", "site.recompute=true"),
        ("workload=gan", "model.width=8", "model.conditional=true", "model.spectral_norm=true"),
        ("workload=pix2pix", "data.name=photo_edges", "model.width=4", "model.depth=3"),
    ],
    ids=["mlp", "dit", "gan", "pix2pix"],
)
def test_a_recipe_trains_samples_and_measures_with_half_of_the_memory(
    words: tuple[str, ...],
) -> None:
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
        assert workload.evaluate(open_shard(config.data, 0, 2, 0).held_out, 0)["fd"] > 0
        params = [p for n in workload.networks.values() for p in n.parameters()]
        states = [s for o in workload.optimizers.values() for s in o.state.values()]
        moments = [value for state in states for value in state.values() if value.dim()]
        held = [*params, *(p.grad for p in params if p.grad is not None), *moments]
        num_bytes[precision] = sum(value.nbytes for value in held)
    assert num_bytes["bf16-true"] < 0.66 * num_bytes["32-true"]  # batch norm is not halved


def test_squares_of_gradients_fall_again_when_gradients_do() -> None:
    found = {}
    for precision in ("32-true", "bf16-true"):
        config = load_run(None, ["workload=flow", "model.width=4", "model.depth=1"])
        config.site.precision = precision
        config.inner["velocity"].beta2 = 0.999
        config.inner["velocity"].lr = 0.0
        workload = load_workload("flow").build(config, CPU)
        optimizer = workload.optimizers["velocity"]
        params = list(workload.networks["velocity"].parameters())
        generator = torch.Generator().manual_seed(0)
        for scale in [1.0] * 300 + [0.1] * 600:
            for param in params:
                gradient = scale * torch.randn(param.shape, generator=generator)
                param.grad = gradient.to(param.dtype)
            optimizer.step()
        squares = [optimizer.state[param]["exp_avg_sq"] for param in params]
        assert all(value.dtype == torch.float32 for value in squares)
        found[precision] = float(torch.cat([value.flatten() for value in squares]).mean())
    assert found["bf16-true"] == pytest.approx(found["32-true"], rel=0.02)


def test_it_is_refused_where_weights_have_to_be_in_fp32() -> None:
    with pytest.raises(ConfigError, match="'bf16-true' does not go with workload 'distill'"):
        load_run(None, ["workload=distill", "model.teacher=/nowhere", TRUE])
    with pytest.raises(ConfigError, match="with strategy 'sync'.*strategy=local_sgd"):
        load_run(None, ["workload=flow", "strategy=sync", TRUE])


# The scale ---------------------------------------------------------------------------------------


def judged(scale: LossScale, *gradients: Tensor) -> bool:
    is_finite = scale.unscale(gradients)
    scale.update(is_finite)
    return is_finite


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_scale_halves_after_one_overflow_and_doubles_after_many_steps(bad: float) -> None:
    scale = LossScale()
    gradient = torch.tensor([3.0, -1e-9]) * scale.factor
    assert judged(scale, gradient, torch.empty(0))
    torch.testing.assert_close(gradient, torch.tensor([3.0, -1e-9]))
    assert not scale.unscale([torch.ones(3), torch.tensor([0.0, bad])])
    assert scale.factor == 2.0**16, "other networks' gradients are still to be unscaled by it"
    scale.update(False)
    for _ in range(2000):
        assert scale.factor == 2.0**15
        assert judged(scale, torch.ones(1))
    assert scale.factor == 2.0**16


def test_what_is_finite_at_no_scale_ends_the_run_in_one_line() -> None:
    scale = LossScale()
    with pytest.raises(FedwanError, match="not finite at any loss scale.*bf16-mixed") as caught:
        for _ in range(100):
            judged(scale, torch.tensor(float("nan")))
    assert "\n" not in str(caught.value)
