"""Delayed Nesterov against Nesterov, and against its equations."""

from __future__ import annotations

import pytest
import torch

from fedwan.outer import delayed_nesterov, nesterov


@pytest.mark.parametrize("every", [1, 2, 4])
def test_deltas_of_the_same_weights_add_up_to_nesterov_on_their_mean(every: int) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = mine = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    plain, delayed = nesterov(0.6, 0.9), delayed_nesterov(0.6, 0.9, every)
    state, own = plain.init({"w": theirs}), delayed.init({"w": mine})
    for _ in range(20):
        deltas = torch.randn(every, 16, 4, generator=generator, dtype=torch.float64)
        update, state = plain.update({"w": deltas.mean(0)}, state)
        theirs = theirs + update["w"]
        for delta in deltas:
            update, own = delayed.update({"w": delta}, own)
            mine = mine + update["w"]
        torch.testing.assert_close(mine, theirs)


def test_momentum_acts_only_with_every_nth_arrival() -> None:
    transform = delayed_nesterov(1.0, 0.5, every=3)
    state = transform.init({"w": torch.zeros(1)})
    moves = []
    for _ in range(6):
        update, state = transform.update({"w": torch.ones(1)}, state)
        moves.append(float(update["w"]))
    first, second = -1 / 3 - 0.5, -1 / 3 - 0.5 * 1.5
    assert moves == pytest.approx([-1 / 3, -1 / 3, first, -1 / 3, -1 / 3, second])
