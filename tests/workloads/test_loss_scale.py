"""The scale of losses in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.errors import FedwanError
from fedwan.workloads.precision import LossScale


def judged(scale: LossScale, *gradients: Tensor) -> bool:
    is_finite = scale.unscale(gradients)
    scale.update(is_finite)
    return is_finite


def test_finite_gradients_are_divided_and_the_scale_stays() -> None:
    scale = LossScale()
    factor = scale.factor
    gradient = torch.tensor([3.0, -1e-9]) * factor
    assert judged(scale, gradient, torch.empty(0))
    torch.testing.assert_close(gradient, torch.tensor([3.0, -1e-9]))
    assert scale.factor == factor == 2.0**16


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_value_of_any_network_that_is_not_finite_halves_the_scale(bad: float) -> None:
    scale = LossScale()
    assert not scale.unscale([torch.ones(3), torch.tensor([0.0, bad])])
    assert scale.factor == 2.0**16, "other networks' gradients are still to be unscaled by it"
    scale.update(False)
    assert scale.factor == 2.0**15


def test_the_scale_doubles_after_many_finite_gradients_in_a_row() -> None:
    scale = LossScale()
    for _ in range(1999):
        assert judged(scale, torch.ones(1))
    assert not judged(scale, torch.tensor(float("nan")))
    for _ in range(2000):
        assert scale.factor == 2.0**15
        assert judged(scale, torch.ones(1))
    assert scale.factor == 2.0**16


def test_a_scale_goes_on_from_what_is_written_into_its_state() -> None:
    scale, restored = LossScale(), LossScale()
    judged(scale, torch.tensor(float("inf")))
    judged(scale, torch.ones(1))
    for name, value in scale.state.items():
        restored.state[name].copy_(value)
    assert restored.factor == 2.0**15 and int(restored.state["streak"]) == 1


def test_what_is_finite_at_no_scale_ends_the_run_in_one_line() -> None:
    scale = LossScale()
    with pytest.raises(FedwanError, match="not finite at any loss scale.*bf16-mixed") as caught:
        for _ in range(100):
            judged(scale, torch.tensor(float("nan")))
    assert "\n" not in str(caught.value)
