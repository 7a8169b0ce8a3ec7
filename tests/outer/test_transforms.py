"""Outer transforms: what all must do, and the arithmetic of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedwan.outer import Transform, chain, clip_by_norm, delayed_nesterov, nesterov, sgd
from fedwan.state import State, clone, read_tensors, write_tensors
from tests.support import same_bits

TRANSFORMS = {
    "sgd": sgd(0.7),
    "nesterov": nesterov(0.7, 0.9),
    "nesterov_without_momentum": nesterov(0.7, 0.0),
    "delayed_nesterov": delayed_nesterov(0.7, 0.9, every=3),
    "clip": clip_by_norm(0.5),
    "clip_never": clip_by_norm(1e9),
    "chain": chain(clip_by_norm(0.5), nesterov(0.7, 0.9)),
    "nested_chain": chain(chain(clip_by_norm(2.0)), chain(nesterov(0.5, 0.5), sgd(-1.0))),
    "empty_chain": chain(),
}

every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())


def random_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "g/empty": (0, 3),
        "g/scalar": (),
        "g/vector": (5,),
        "g/weight": (3, 4),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def run(transform: Transform, state: State, steps: range) -> tuple[list[State], State]:
    updates = []
    for step in steps:
        update, state = transform.update(random_state(step), state, random_state(0))
        updates.append(update)
    return updates, state


@every_transform
def test_keeps_names_shapes_and_dtypes(transform: Transform) -> None:
    delta = random_state(1)
    update, _ = transform.update(delta, transform.init(random_state(0)), random_state(0))
    assert list(update) == list(delta)
    for name, value in update.items():
        assert (value.shape, value.dtype) == (delta[name].shape, delta[name].dtype)


@every_transform
def test_mutates_none_of_its_inputs(transform: Transform) -> None:
    params, delta = random_state(0), random_state(1)
    _, state = run(transform, transform.init(params), range(2, 4))
    inputs = (params, delta, state)
    before = [clone(value) for value in inputs]
    transform.init(params)
    transform.update(delta, state, params)
    assert all(same_bits(a, b) for a, b in zip(inputs, before, strict=True))


@every_transform
def test_update_shares_no_memory_with_parameters_or_state(transform: Transform) -> None:
    params = random_state(0)
    old = transform.init(params)
    update, new = transform.update(random_state(1), old, params)
    kept = {n: v for state in (params, old, new) for n, v in state.items() if v.numel()}
    addresses = {value.data_ptr() for value in kept.values()}
    assert not addresses & {value.data_ptr() for value in update.values() if value.numel()}


@every_transform
def test_state_round_trips_through_safetensors(transform: Transform, tmp_path: Path) -> None:
    _, state = run(transform, transform.init(random_state(0)), range(1, 4))
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    write_tensors(tmp_path / "state", state, {})
    assert same_bits(read_tensors(tmp_path / "state")[0], state)


@every_transform
def test_every_state_name_ends_in_its_tensors_name(transform: Transform) -> None:
    params = random_state(0)
    assert all(name.rpartition(":")[2] in params for name in transform.init(params))


@every_transform
def test_resume_is_bit_identical(transform: Transform, tmp_path: Path) -> None:
    first = transform.init(random_state(0))
    whole, last = run(transform, first, range(1, 9))
    _, middle = run(transform, first, range(1, 5))
    write_tensors(tmp_path / "state", middle, {})
    resumed, end = run(transform, read_tensors(tmp_path / "state")[0], range(5, 9))
    assert all(same_bits(a, b) for a, b in zip(whole[4:], resumed, strict=True))
    assert same_bits(end, last)


@pytest.mark.parametrize("transform", [t for t in TRANSFORMS.values() if t.per_tensor])
def test_per_tensor_means_one_tensor_at_a_time_gives_the_same(transform: Transform) -> None:
    params, delta = random_state(0), random_state(1)
    _, state = run(transform, transform.init(params), range(2, 4))
    whole, after = transform.update(delta, state, params)
    for name, value in delta.items():
        part = {n: v for n, v in state.items() if n.endswith(f":{name}")}
        update, new = transform.update({name: value}, part, {name: params[name]})
        assert same_bits(update, {name: whole[name]})
        assert same_bits(new, {n: after[n] for n in part})


@every_transform
def test_nothing_in_nothing_out(transform: Transform) -> None:
    update, state = transform.update({}, transform.init({}), {})
    assert (update, state) == ({}, {})


def deltas() -> list[State]:
    generator = torch.Generator().manual_seed(3)
    return [{"w": torch.randn(6, generator=generator)} for _ in range(5)]


def test_chain_is_one_after_the_other() -> None:
    clip, outer = clip_by_norm(1.0), nesterov(0.7, 0.9)
    both = chain(clip, outer)
    params = {"w": torch.zeros(6)}
    by_hand, together = outer.init(params), both.init(params)
    for delta in deltas():
        clipped, _ = clip.update(delta, {})
        expected, by_hand = outer.update(clipped, by_hand)
        update, together = both.update(delta, together)
        assert same_bits(update, expected)


def test_a_transform_may_stand_in_a_chain_twice() -> None:
    twice = chain(nesterov(1.0, 0.5), nesterov(-1.0, 0.9))
    assert sorted(twice.init({"w": torch.zeros(1)})) == ["0:momentum:w", "1:momentum:w"]


def test_a_chain_is_per_tensor_only_if_all_its_parts_are() -> None:
    assert chain(sgd(1.0), nesterov(1.0, 0.5)).per_tensor
    assert not chain(sgd(1.0), clip_by_norm(1.0)).per_tensor


def test_a_larger_norm_is_cut_to_the_limit_over_all_tensors_together() -> None:
    update, _ = clip_by_norm(1.0).update({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, {})
    torch.testing.assert_close(update, {"a": torch.tensor([0.6]), "b": torch.tensor([0.8])})


def test_a_smaller_norm_is_left_as_it_is() -> None:
    delta = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    update, _ = clip_by_norm(5.1).update(delta, {})
    assert torch.equal(update["a"], delta["a"]) and torch.equal(update["b"], delta["b"])


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


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.5), (0.6, 0.9), (1.0, 0.1)])
def test_agrees_with_torch_over_200_steps(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(64, 8, generator=generator))
    mine = theirs.detach().clone()
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=True)
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


def test_without_momentum_is_sgd() -> None:
    delta = {"w": torch.randn(9)}
    transform = nesterov(0.3, 0.0)
    update, _ = transform.update(delta, transform.init(delta))
    assert torch.equal(update["w"], delta["w"] * -0.3)


def test_a_fragment_moves_only_its_own_momentum() -> None:
    params: State = {"a": torch.zeros(2), "b": torch.zeros(2)}
    transform = nesterov(1.0, 0.5)
    _, state = transform.update({"a": torch.ones(2)}, transform.init(params))
    assert list(state) == ["momentum:a"]


def test_lr_1_is_averaging() -> None:
    base = torch.tensor([1.0, -2.0, 0.5])
    sites = [torch.tensor([2.0, 0.0, 0.5]), torch.tensor([0.0, -1.0, 1.5])]
    delta = sum(base - site for site in sites) / 2
    update, _ = sgd(1.0).update({"w": delta}, {})
    assert torch.equal(base + update["w"], (sites[0] + sites[1]) / 2)
