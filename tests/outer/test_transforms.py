"""Outer transforms: what all must do, and the arithmetic of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedwan.outer import Transform, chain, delayed_nesterov, nesterov, sgd
from fedwan.state import State, clone, read_tensors, write_tensors
from tests.support import same_bits

TRANSFORMS = {
    "sgd": sgd(0.7),
    "nesterov": nesterov(0.7, 0.9),
    "delayed_nesterov": delayed_nesterov(0.7, 0.9, every=3),
    "chain": chain(chain(sgd(-0.5)), chain(nesterov(0.5, 0.5), nesterov(-1.0, 0.9))),
    "empty_chain": chain(),
}

every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())


def random(seed: int, shape: tuple[int, ...] = (3, 4)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(transform: Transform, state: State, steps: range) -> tuple[list[Tensor], State]:
    updates = []
    for step in steps:
        update, state = transform.update(random(step), state)
        updates.append(update)
    return updates, state


@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 3)])
@every_transform
def test_an_update_is_like_its_delta_and_neither_is_part_of_the_state(
    transform: Transform, shape: tuple[int, ...]
) -> None:
    param, delta = random(0, shape), random(1, shape)
    _, state = transform.update(random(2, shape), transform.init(param))
    update, new = transform.update(delta, state)
    assert (update.shape, update.dtype) == (delta.shape, delta.dtype)
    kept = {value.data_ptr() for value in (*state.values(), *new.values())} - {0}
    assert not kept & {value.data_ptr() for value in (param, delta, update)}
    assert torch.equal(param, random(0, shape))


@every_transform
def test_a_run_resumes_bit_for_bit_from_a_file(transform: Transform, tmp_path: Path) -> None:
    first = transform.init(random(0))
    whole, last = run(transform, clone(first), range(1, 9))
    _, middle = run(transform, first, range(1, 5))
    write_tensors(tmp_path / "state", middle, {})
    resumed, end = run(transform, read_tensors(tmp_path / "state")[0], range(5, 9))
    assert all(map(torch.equal, whole[4:], resumed))
    assert same_bits(end, last)


def test_a_chain_is_one_after_the_other_and_a_transform_may_stand_in_it_twice() -> None:
    first, second = nesterov(1.0, 0.5), nesterov(-1.0, 0.9)
    both = chain(first, second)
    state, by_hand = both.init(random(0)), [first.init(random(0)), second.init(random(0))]
    assert set(state) == {"0:momentum", "1:momentum"}
    for seed in range(1, 5):
        between, by_hand[0] = first.update(random(seed), by_hand[0])
        expected, by_hand[1] = second.update(between, by_hand[1])
        update, state = both.update(random(seed), state)
        assert torch.equal(update, expected)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.5), (1.0, 0.0)])
def test_nesterov_agrees_with_torch_over_200_steps(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(64, 8, generator=generator))
    mine = theirs.detach().clone()
    nests = {"momentum": momentum, "nesterov": True} if momentum else {}
    optimizer = torch.optim.SGD([theirs], lr=lr, **nests)
    transform = nesterov(lr, momentum)
    state = transform.init(mine)
    for _ in range(200):
        # Deltas pull towards zero, so that 200 steps stay of the order of one.
        delta = 0.05 * mine + 0.01 * torch.randn(mine.shape, generator=generator)
        theirs.grad = delta.clone()
        optimizer.step()
        update, state = transform.update(delta, state)
        mine = mine + update
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_deltas_of_the_same_weights_add_up_to_nesterov_on_their_mean(every: int) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = mine = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    plain, delayed = nesterov(0.6, 0.9), delayed_nesterov(0.6, 0.9, every)
    state, own = plain.init(theirs), delayed.init(mine)
    for _ in range(20):
        deltas = torch.randn(every, 16, 4, generator=generator, dtype=torch.float64)
        update, state = plain.update(deltas.mean(0), state)
        theirs = theirs + update
        for delta in deltas:
            update, own = delayed.update(delta, own)
            mine = mine + update
        torch.testing.assert_close(mine, theirs)


def test_momentum_acts_on_in_a_run_that_goes_on_with_fewer_sites() -> None:
    ones = torch.ones(3)
    more, fewer = delayed_nesterov(0.6, 0.9, 4), delayed_nesterov(0.6, 0.9, 2)
    state = more.init(ones)
    for transform in (more, more, more, fewer):
        _, state = transform.update(ones, state)
    assert not state["count"] and state["momentum"].all()
