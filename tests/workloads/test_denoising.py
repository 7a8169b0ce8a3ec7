"""What is learned by a scheduler of diffusers: noise, targets, and weights of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.workloads.denoising import Denoising, Noised

pytestmark = pytest.mark.slow
X = torch.zeros(4096, 2, 2, 2)
SNR_MAX = 5.0


def noised(offset: float = 0.0, min_snr: float = SNR_MAX, **scheduler: Any) -> Noised:
    """Zeros, at all noise levels."""
    return Denoising(scheduler, "DDPMScheduler", min_snr).noised(
        X, NamedGenerators(0, "s1"), offset
    )


def snr_of(timestep: Tensor) -> Tensor:
    """Of DDPM's linear betas, in fp64."""
    kept = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)[timestep]
    return kept / (1 - kept)


@pytest.mark.parametrize("target", ["epsilon", "v_prediction", "sample"])
def test_min_snr_weighs_as_the_paper_has_it(target: str) -> None:
    given = noised(prediction_type=target)
    snr = snr_of(given.timestep)
    least = snr.clamp(max=SNR_MAX)
    paper = {"epsilon": least / snr, "v_prediction": least / (snr + 1), "sample": least}[target]
    torch.testing.assert_close(given.weight.double(), paper, rtol=1e-3, atol=1e-6)
    loss = (given.weight * given.target.square().mean((1, 2, 3))).mean()
    torch.testing.assert_close(given.loss(torch.zeros_like(X)), loss)


def test_min_snr_of_a_timestep_without_signal_is_finite() -> None:
    given = noised(prediction_type="epsilon", rescale_betas_zero_snr=True)
    last = given.timestep == 999
    assert last.any()
    assert (given.weight[last] == 1).all() and given.weight.isfinite().all()


@pytest.mark.parametrize(
    ("found", "default", "mend"),
    [
        ({}, "", "put the right _class_name into the folder's scheduler_config.json"),
        ({"_class_name": "DDPMSchedule"}, "DDPMScheduler", "_class_name .*'DDPMScheduler'"),
        ({}, "DDPMSchedule", "set model.scheduler=DDPMScheduler; did you mean 'DDPMScheduler'"),
    ],
)
def test_a_scheduler_that_nobody_knows_is_told_with_where_it_is_named(
    found: dict[str, Any], default: str, mend: str
) -> None:
    with pytest.raises(ConfigError, match=f"is none of diffusers'; .*{mend}"):
        Denoising(found, default)


def test_a_flow_has_no_weights() -> None:
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    assert noised(min_snr=0, **flow).weight is None
    with pytest.raises(ConfigError, match="min_snr = 5.0 has no effect on a flow"):
        noised(**flow)


def test_offset_noise_is_one_draw_per_sample_and_channel() -> None:
    plain, offset = noised(), noised(offset=0.1)
    added = offset.target - plain.target
    assert torch.equal(plain.timestep, offset.timestep)
    torch.testing.assert_close(added, added[..., :1, :1].expand_as(added), rtol=0, atol=1e-6)
    assert float(added[..., 0, 0].std()) == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(added[:, 0], added[:, 1])
    share = (1 / (1 + snr_of(plain.timestep))).sqrt().view(-1, 1, 1, 1)  # of noise, eq. 4
    torch.testing.assert_close((offset.x - plain.x).double(), share * added, rtol=1e-3, atol=1e-6)
