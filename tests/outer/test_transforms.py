"""Outer transforms: what all must do, and the arithmetic of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


def random_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"g/empty": (0, 3), "g/scalar": (), "g/vector": (5,), "g/weight": (3, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def run(transform: Transform, state: State, steps: range) -> tuple[list[State], State]:
    updates = []
    for step in steps:
        update, state = transform.update(random_state(step), state)
        updates.append(update)
    return updates, state


@every_transform
def test_an_update_is_like_its_delta_and_nothing_that_was_given_changes(
    transform: Transform,
) -> None:
    params, delta = random_state(0), random_state(1)
    _, state = run(transform, transform.init(params), range(2, 4))
    inputs = (params, delta, state)
    before = [clone(value) for value in inputs]
    update, new = transform.update(delta, state)
    assert {n: (v.shape, v.dtype) for n, v in update.items()} == {
        n: (v.shape, v.dtype) for n, v in delta.items()
    }
    kept = {value.data_ptr() for held in (params, state, new) for value in held.values()} - {0}
    if update is not delta:
        assert not kept & {value.data_ptr() for value in update.values()}
    assert all(same_bits(a, b) for a, b in zip(inputs, before, strict=True))
    assert all(name.rpartition(":")[2] in params for name in state)
    assert transform.update({}, transform.init({})) == ({}, {})


@every_transform
def test_a_run_resumes_bit_for_bit_from_a_file(transform: Transform, tmp_path: Path) -> None:
    first = transform.init(random_state(0))
    whole, last = run(transform, first, range(1, 9))
    _, middle = run(transform, first, range(1, 5))
    write_tensors(tmp_path / "state", middle, {})
    resumed, end = run(transform, read_tensors(tmp_path / "state")[0], range(5, 9))
    assert all(same_bits(a, b) for a, b in zip(whole[4:], resumed, strict=True))
    assert same_bits(end, last)


@every_transform
def test_one_tensor_at_a_time_gives_the_same(transform: Transform) -> None:
    delta = random_state(1)
    _, state = run(transform, transform.init(random_state(0)), range(2, 4))
    whole, after = transform.update(delta, state)
    for name, value in delta.items():
        part = {n: v for n, v in state.items() if n.endswith(f":{name}")}
        update, new = transform.update({name: value}, part)
        assert same_bits(update, {name: whole[name]})
        assert same_bits(new, {n: after[n] for n in part})


def test_a_chain_is_one_after_the_other_and_a_transform_may_stand_in_it_twice() -> None:
    first, second = nesterov(1.0, 0.5), nesterov(-1.0, 0.9)
    both = chain(first, second)
    params = random_state(0)
    state, by_hand = both.init(params), [first.init(params), second.init(params)]
    assert {name[:11] for name in state} == {"0:momentum:", "1:momentum:"}
    for seed in range(1, 5):
        between, by_hand[0] = first.update(random_state(seed), by_hand[0])
        expected, by_hand[1] = second.update(between, by_hand[1])
        update, state = both.update(random_state(seed), state)
        assert same_bits(update, expected)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.5), (1.0, 0.0)])
def test_nesterov_agrees_with_torch_over_200_steps(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(64, 8, generator=generator))
    mine = theirs.detach().clone()
    nests = {"momentum": momentum, "nesterov": True} if momentum else {}
    optimizer = torch.optim.SGD([theirs], lr=lr, **nests)
    transform = nesterov(lr, momentum)
    state = transform.init({"w": mine})
    for _ in range(200):
        # Deltas pull towards zero, so that 200 steps stay of the order of one.
        delta = 0.05 * mine + 0.01 * torch.randn(mine.shape, generator=generator)
        theirs.grad = delta.clone()
        optimizer.step()
        update, state = transform.update({"w": delta}, state)
        mine = mine + update["w"]
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)


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


def test_momentum_acts_on_in_a_run_that_goes_on_with_fewer_sites() -> None:
    ones = {"w": torch.ones(3)}
    more, fewer = delayed_nesterov(0.6, 0.9, 4), delayed_nesterov(0.6, 0.9, 2)
    state = more.init(ones)
    for transform in (more, more, more, fewer):
        _, state = transform.update(ones, state)
    assert not state["count:w"] and state["momentum:w"].all()
