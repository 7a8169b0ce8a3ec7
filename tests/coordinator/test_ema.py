"""The moving average of the global weights."""

from __future__ import annotations

import pytest
import torch

from fedwan.coordinator.model import update_ema
from fedwan.state import Layout, Role, State
from tests.support import spec

LAYOUT: Layout = {
    "g/n": spec((), Role.COUNTER, torch.int64),
    "g/var": spec((), Role.VARIANCE),
    "g/w": spec((2,)),
}


def state(n: int, var: float, w: float) -> State:
    return {"g/n": torch.tensor(n), "g/var": torch.tensor(var), "g/w": torch.full((2,), w)}


def test_after_a_half_life_the_old_state_counts_half() -> None:
    ema = state(1, 1.0, 0.0)
    update_ema(ema, state(9, 3.0, 8.0), LAYOUT, samples=500, half_life=500.0)
    assert (int(ema["g/n"]), float(ema["g/var"]), ema["g/w"].tolist()) == (9, 2.0, [4.0, 4.0])


@pytest.mark.parametrize("parts", [1, 4, 40])
def test_it_does_not_depend_on_how_many_samples_make_a_round(parts: int) -> None:
    ema = state(0, 1.0, 1.0)
    for _ in range(parts):
        update_ema(ema, state(0, 0.0, 0.0), LAYOUT, samples=1200 // parts, half_life=400.0)
    torch.testing.assert_close(ema["g/w"], torch.full((2,), 0.125))


def test_no_samples_move_nothing() -> None:
    ema = state(0, 1.0, 1.0)
    update_ema(ema, state(0, 5.0, 5.0), LAYOUT, samples=0, half_life=400.0)
    assert ema["g/w"].tolist() == [1.0, 1.0]


def test_variances_stay_above_zero() -> None:
    ema = state(0, 1e-30, 1.0)
    for samples in (1, 300, 10**9):
        update_ema(ema, state(0, 0.0, 0.0), LAYOUT, samples, 400.0)
        assert ema["g/var"] >= 0


def test_the_state_is_not_touched() -> None:
    new = state(3, 2.0, 7.0)
    update_ema(state(0, 0.0, 0.0), new, LAYOUT, 10, 10.0)
    assert (int(new["g/n"]), float(new["g/var"]), new["g/w"].tolist()) == (3, 2.0, [7.0, 7.0])


def test_a_fragment_moves_its_own_tensors_alone() -> None:
    ema = state(0, 1.0, 1.0)
    update_ema(ema, {"g/w": torch.zeros(2)}, LAYOUT, 400, 400.0)
    assert (float(ema["g/var"]), ema["g/w"].tolist()) == (1.0, [0.5, 0.5])
